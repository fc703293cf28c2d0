"""Looks at growing numbers of seeds: published bounds, error rates by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm
from scipy.stats import t as student

from research.looks import T_EXCESS, levels, p_of_look, spent

THIRDS = (1 / 3, 2 / 3, 1.0)


@pytest.mark.parametrize(
    ("looks", "bounds"),
    [
        (3, [2.279, 2.295, 2.296]),
        (5, [2.438, 2.427, 2.410, 2.397, 2.386]),
    ],
)
def test_the_bounds_are_the_published_ones(looks: int, bounds: list[float]) -> None:
    """Pocock-like spending, two-sided 5 %, equally spaced looks.

    Reboussin, DeMets, Kim, Lan: Computations for group sequential boundaries using the Lan-DeMets
    spending function method, Controlled Clinical Trials 21, 2000.
    """
    found = levels(tuple(n / looks for n in range(1, looks + 1)), 0.05)
    assert [norm.isf(p / 2) for p in found] == pytest.approx(bounds, abs=1e-3)


def test_the_looks_spend_what_they_may() -> None:
    """By another way: the probability that no look crosses, from the joint normal distribution."""
    level = 0.05 / 158
    found = levels(THIRDS, level)
    assert spent(level, 1) == pytest.approx(level) and sum(found) > level > max(found)
    bounds = norm.isf(np.array(found) / 2)
    for n in (1, 2, 3):
        covariance = [[math.sqrt(min(s, t) / max(s, t)) for s in THIRDS[:n]] for t in THIRDS[:n]]
        joint = multivariate_normal(cov=covariance, seed=0, abseps=1e-7)
        inside = joint.cdf(bounds[:n], lower_limit=-bounds[:n])
        assert 1 - inside == pytest.approx(spent(level, THIRDS[n - 1]), rel=0.005)


@pytest.mark.slow
def test_t_tests_keep_the_error_rate_at_a_level_divided_by_their_excess() -> None:
    """Four million claims without an effect, at 8, 16 and 24 seeds. A deviation is 0.5 %."""
    random, claims = np.random.default_rng(0), 4_000_000
    total, squares, ts = np.zeros(claims), np.zeros(claims), []
    for n in (8, 16, 24):  # mean and variance of eight more seeds are independent
        mean = random.normal(scale=math.sqrt(1 / 8), size=claims)
        total += 8 * mean
        squares += random.chisquare(7, claims) + 8 * mean**2
        deviation = np.sqrt((squares - total**2 / n) / (n - 1))
        ts.append(np.abs(total) / math.sqrt(n) / deviation)

    def decided(level: float) -> float:
        bounds = [
            student.isf(p / 2, df) for p, df in zip(levels(THIRDS, level), (7, 15, 23), strict=True)
        ]
        return float(
            np.any([of > bound for of, bound in zip(ts, bounds, strict=True)], axis=0).mean()
        )

    assert decided(0.01) > 0.0103, "as levels for t tests they are too large"
    assert 0.0097 < decided(0.01 / T_EXCESS) < 0.0101


@pytest.mark.parametrize("level", [0.05, 1e-4, 1e-9])
def test_p_of_a_look_is_the_level_at_which_it_rejects(level: float) -> None:
    for look, p in enumerate(levels(THIRDS, level), start=1):
        assert p_of_look(p, THIRDS[:look]) == pytest.approx(level, rel=1e-6)
    assert p_of_look(0.0123, (1.0,)) == pytest.approx(0.0123), "one look is no sequence"
    assert p_of_look(0.9, THIRDS[:1]) == 1, "no level lets the first look reject that"
    assert 0 < p_of_look(0.0, THIRDS) <= 1e-12
