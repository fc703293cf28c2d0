"""Paired tests over seeds against arithmetic by hand, and what they allow to say at each border."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from scipy.stats import t

from fedml_noniid.pipelines.reporting.comparison import (
    Comparison,
    holm,
    p_value,
    paired,
    per_deviation,
    power,
    seeds_needed,
)
from fedml_noniid.pipelines.reporting.summary import Spread

STEP = 0.01  # one of 100 test samples
HALF = 4.302652730 / math.sqrt(3)  # t of two degrees of freedom at 97.5 %, from a printed table


def of(samples: Sequence[float], holm_factor: float = 1.0) -> Comparison:
    """A comparison with these differences in test samples. `holm_factor`: what Holm makes of p."""
    theirs = dict.fromkeys(range(len(samples)), 0.25)
    found = paired("a", {seed: 0.25 + STEP * d for seed, d in enumerate(samples)}, theirs, STEP)
    return found if found.p is None else found._replace(holm_p=min(1.0, holm_factor * found.p))


def test_one_two_three_by_hand() -> None:
    """Mean 2, deviation 1. Two degrees of freedom: p = 1 - t / sqrt(t^2 + 2), t = 2 sqrt(3)."""
    found = of([1, 2, 3])
    assert found.mean == pytest.approx(0.02) and found.low is not None and found.high is not None
    assert (found.low, found.high) == pytest.approx((0.02 - HALF / 100, 0.02 + HALF / 100))
    assert pytest.approx(2.484, abs=0.0005) == HALF
    assert found.p == pytest.approx(1 - 2 * math.sqrt(3) / math.sqrt(14))
    assert found.higher == 3


def test_only_common_seeds_count() -> None:
    """Seeds 1 and 4: 0.1 and 0.3. One degree of freedom: t = 2, p = 1 - 2 atan(2) / pi."""
    found = paired("a", {1: 0.6, 2: 0.9, 4: 0.8}, {4: 0.5, 1: 0.5, 3: 0.1}, STEP)
    assert found.differences == pytest.approx((0.1, 0.3))
    assert found.p == pytest.approx(1 - 2 * math.atan(2) / math.pi)


def test_equal_differences_count_as_if_one_seed_were_one_sample_off() -> None:
    """Deviation of 0, 0, 1 samples: 1 / sqrt(3).

    So t = 3 for one sample and 6 for two; the interval is a point.
    """
    one, two = of([1, 1, 1]), of([2, 2, 2])
    assert one.p == pytest.approx(1 - 3 / math.sqrt(11)) and two.p == pytest.approx(
        1 - 6 / math.sqrt(38)
    )
    assert one.low == one.high == one.mean and two.deviation == pytest.approx(STEP / math.sqrt(3))


@pytest.mark.parametrize(
    ("ps", "adjusted"),
    [
        # 3 * 0.01; 2 * 0.03; 1 * 0.04 is raised to the one before.
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),
        ([0.7, 0.01, 0.8], [1.0, 0.03, 1.0]),
        ([0.02, 0.02], [0.04, 0.04]),
        ([0.04], [0.04]),
        ([], []),
    ],
)
def test_holm_by_hand(ps: Sequence[float], adjusted: Sequence[float]) -> None:
    assert holm(ps) == pytest.approx(adjusted)


@pytest.mark.parametrize(
    ("samples", "holm_factor", "verdict"),
    [
        ([], 1, "no seed"),
        ([9], 1, "one seed"),
        ([0, 0, 0], 1, "within one sample"),
        ([1, 1, 1], 1, "within one sample"),
        ([-1, -1, -1], 1, "within one sample"),
        ([0.8, 1, 1.2, 1, 1], 1, "within one sample"),  # decided, but one sample on average
        ([2, 2, 2], 1, "better"),  # p = 0.027
        ([2, 2, 2], 2, "undecided"),
        ([-2, -2, -3], 1, "worse"),  # t = 7, p = 0.020
        ([2, 2, 3], 1, "better"),
        ([2, 2, 3], 3, "undecided"),
        ([1, 2, 2], 1, "better"),  # t = 5, p = 0.038
        ([1, 1, 2], 1, "undecided"),  # t = 4, p = 0.057
        ([-4, 0, 5], 1, "undecided"),
        ([-1, 0, 1], 1, "undecided"),  # up to 2.48 samples either way
    ],
)
def test_verdicts_at_their_borders(
    samples: Sequence[float], holm_factor: float, verdict: str
) -> None:
    assert of(samples, holm_factor).verdict == verdict


def test_seeds_that_would_decide() -> None:
    """Mean 2, deviation 2 samples: sqrt(n) has to exceed t.

    2.447 of six degrees of freedom: seven seeds.

    Printed tables, at 97.5 %: 2.571 of five, so six seeds (2.449) are too few. Of two comparisons,
    at 98.75 %: 2.841 of seven degrees, so eight seeds (2.828) are too few, nine (2.752) are enough.
    """
    found = of([0, 2, 4])
    assert found.deviation == pytest.approx(2 * STEP)
    assert (seeds_needed(found, 1), seeds_needed(found, 2)) == (7, 9)
    assert seeds_needed(of([-9, 1, 9]), 1) is None  # deviation 9.02, mean 1 / 3: some 2800 seeds


@pytest.mark.parametrize(("size", "seeds"), [(0.5, 34), (0.8, 15), (1.0, 10), (0.1, None)])
def test_seeds_for_a_power_of_80_percent(size: float, seeds: int | None) -> None:
    """Printed tables of the paired t test, two-sided 5 %: Cohen's d of 0.5, 0.8 and 1.

    At d = 0.1 it takes 787.
    """
    enough = (n for n in range(2, 101) if power(2 * size, 2, n, 0.05) >= 0.8)
    assert next(enough, None) == seeds
    assert power(-2 * size, 2, 30, 0.05) < 0.025, "the other side"
    assert power(size, 0, 30, 0.05) == 0, "equal differences have no test"


@pytest.mark.parametrize("n", [2, 3, 10, 100])
def test_the_tests_are_those_of_scipy(n: int) -> None:
    for ratio in (0.01, 1.0, 2.5, 40.0):
        wanted = 2 * t.sf(ratio * math.sqrt(n), n - 1)
        assert p_value(Spread(ratio, 1.0, n)) == pytest.approx(wanted, rel=1e-12)
    for level in (0.05, 0.05 / 34):
        assert per_deviation(n, level) == pytest.approx(
            t.ppf(1 - level / 2, n - 1) / math.sqrt(n), rel=1e-12
        )
