"""Looks at growing numbers of seeds: published bounds, error rates by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm, ttest_1samp

from fedml_noniid.pipelines.reporting.looks import levels, p_of_look, spent

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


@pytest.mark.parametrize("level", [0.05, 0.05 / 158])
def test_the_looks_spend_what_they_may(level: float) -> None:
    """By another way: the probability that no look crosses, from the joint normal distribution."""
    found = levels(THIRDS, level)
    assert spent(level, 1) == pytest.approx(level) and sum(found) > level > max(found)
    bounds = norm.isf(np.array(found) / 2)
    for n in (1, 2, 3):
        covariance = [[math.sqrt(min(s, t) / max(s, t)) for s in THIRDS[:n]] for t in THIRDS[:n]]
        joint = multivariate_normal(cov=covariance, seed=0, abseps=1e-7)
        inside = joint.cdf(bounds[:n], lower_limit=-bounds[:n])
        assert 1 - inside == pytest.approx(spent(level, THIRDS[n - 1]), rel=0.005)


def test_t_tests_at_these_levels_keep_the_error_rate() -> None:
    """30,000 claims without an effect, 8, 16 and 24 seeds: 5 % are decided, three deviations 0.4 %.

    Three looks at 5 % each would decide about 11 %.
    """
    numbers = np.random.default_rng(0).normal(size=(30_000, 24))
    ps = np.array([ttest_1samp(numbers[:, :n], 0, axis=1).pvalue for n in (8, 16, 24)])
    assert (ps < np.array(levels(THIRDS, 0.05))[:, None]).any(0).mean() == pytest.approx(
        0.05, abs=0.005
    )
    assert (ps < 0.05).any(0).mean() > 0.09


@pytest.mark.parametrize("level", [0.05, 1e-4, 1e-9])
def test_p_of_a_look_is_the_level_at_which_it_rejects(level: float) -> None:
    for look, p in enumerate(levels(THIRDS, level), start=1):
        assert p_of_look(p, THIRDS[:look]) == pytest.approx(level, rel=1e-6)
    assert p_of_look(0.0123, (1.0,)) == 0.0123, "one look is no sequence"
    assert p_of_look(0.9, THIRDS[:1]) == 1, "no level lets the first look reject that"
    assert 0 < p_of_look(0.0, THIRDS) <= 1e-12
