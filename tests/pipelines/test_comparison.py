"""Paired tests over seeds against arithmetic by hand, and what they allow to say at each border."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from scipy.stats import t, ttest_1samp

from fedml_noniid.pipelines.reporting.comparison import (
    LEVEL,
    Comparison,
    adjusted,
    confirmed,
    holm,
    interval,
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
    if found.p is None:
        return found
    return found._replace(holm_p=min(1.0, holm_factor * found.p), level=LEVEL / holm_factor)


def test_equal_differences_count_as_if_one_seed_were_one_sample_off() -> None:
    """Deviation of 0, 0, 1 samples: 1 / sqrt(3).

    So t = 3 for one sample and 6 for two. The interval is that of the same test.
    """
    one, two = of([1, 1, 1]), of([2, 2, 2])
    assert one.p == pytest.approx(1 - 3 / math.sqrt(11)) and two.p == pytest.approx(
        1 - 6 / math.sqrt(38)
    )
    half = HALF * STEP / math.sqrt(3)
    assert two.deviation == pytest.approx(STEP / math.sqrt(3))
    assert two.interval == pytest.approx((2 * STEP - half, 2 * STEP + half))


def test_gains_that_only_rounding_separates_are_equal() -> None:
    """0.3 - 0.1 and 0.4 - 0.2 are 0.2 and 0.2: as floats they differ by 3e-17."""
    ours, theirs = {0: 30 * 0.01, 1: 40 * 0.01}, {0: 0.1, 1: 0.2}
    one = paired("a", ours, theirs, 0.0)
    assert len(set(one.differences)) == 2, "the floats differ"
    assert (one.p, one.interval, one.deviation) == (1.0, None, 0.0)
    assert confirmed([one, one]) == (0, 0)
    # One sample on one of two seeds has the deviation 1 / sqrt(2) samples; t = 0.2 / (0.01 / 2).
    known = paired("a", ours, theirs, 0.01)
    assert known.p == pytest.approx(1 - 2 * math.atan(40) / math.pi)


def test_small_numbers_are_not_taken_for_rounding() -> None:
    """1, 2 and 3 times 1e-12, as differences of a metric of that size."""
    ours = {seed: 1e-12 * (seed + 1) for seed in range(3)}
    one = paired("a", ours, dict.fromkeys(ours, 0.0), 0.0)
    assert one.p == pytest.approx(of([1, 2, 3]).p) and one.deviation == pytest.approx(1e-12)


def test_the_interval_has_0_in_it_unless_the_adjusted_p_decides() -> None:
    """Any number of comparisons, of any size."""
    random = np.random.default_rng(0)
    decided = {True: 0, False: 0}
    for _ in range(300):
        n, seeds = random.integers(1, 7), random.integers(2, 9)
        shifts = random.choice([0.0, 0.5, 1.5, 4.0], n)
        every = [
            paired(
                "a",
                dict(enumerate(random.normal(shift, 1, seeds))),
                dict.fromkeys(range(seeds), 0.0),
                0.0,
            )
            for shift in shifts
        ]
        for one in adjusted([*every, Comparison("one seed", (1.0,), 0.0)])[:-1]:
            assert one.interval is not None and one.holm_p is not None
            low, high = one.interval
            assert (low > 0 or high < 0) == (one.holm_p < LEVEL) == one.is_decided
            decided[one.is_decided] += 1
    assert min(decided.values()) > 100


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
        ([0, 0, 0], 1, "undecided"),  # up to 4.30 / 3 samples either way
        ([0, 0, 0, 0], 1, "within one sample"),  # up to 3.18 / 4
        ([0, 0, 0, 0], 3, "undecided"),  # up to 4.86 / 4, of three comparisons
        ([1, 1, 1], 1, "undecided"),
        ([1, 1, 1, 1], 1, "within one sample"),  # p = 0.028, but one sample
        ([-1, -1, -1, -1], 1, "within one sample"),
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
    """Of the seeds that both have."""
    for ratio in (0.01, 1.0, 2.5, 40.0):
        numbers = np.random.default_rng(n).normal(ratio, 1, n)
        one = paired("a", dict(enumerate(numbers)), dict.fromkeys(range(1, n + 5), 0.0), 0.0)
        if n > 2:
            known = ttest_1samp(numbers[1:], 0)
            ends = known.confidence_interval(0.95)
            assert one.p == pytest.approx(known.pvalue, rel=1e-9)
            assert one.interval == pytest.approx((ends.low, ends.high), rel=1e-9)
            assert one.higher == (numbers[1:] > 0).sum()
    for level in (0.05, 0.05 / 34):
        half = t.ppf(1 - level / 2, n - 1) / math.sqrt(n)
        assert per_deviation(n, level) == pytest.approx(half, rel=1e-12)
        assert interval(Spread(7.0, 1.0, n), level) == pytest.approx((7 - half, 7 + half))
