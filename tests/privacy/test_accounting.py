"""Epsilon of Gaussian releases: that of dp-accounting called by hand, and never below the exact
one."""

from __future__ import annotations

import math

import pytest
from scipy import optimize, stats

from fedml_noniid.privacy.accounting import epsilon

pytest.importorskip("dp_accounting", reason="epsilon needs the extra [privacy]")

# (noise multiplier -> releases, delta)
FIVE = [
    ({4.0: 40}, 1e-5),
    ({1.0: 1}, 1e-5),
    ({2.0: 100}, 1e-6),
    ({10.0: 500}, 1e-5),
    ({1.0: 3, 5.0: 200}, 1e-4),
]


@pytest.mark.parametrize(("counts", "delta"), FIVE)
def test_it_is_dp_accounting_called_by_hand(counts, delta):
    """One event per release, in the order of a run, with the accountant's own orders."""
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    events = [dp_accounting.GaussianDpEvent(z) for z, n in counts.items() for _ in range(n)]
    by_hand = RdpAccountant().compose(dp_accounting.ComposedDpEvent(events)).get_epsilon(delta)
    assert epsilon(counts, delta) == pytest.approx(by_hand, rel=0.01)


@pytest.mark.parametrize(("counts", "delta"), FIVE)
def test_it_bounds_the_exact_epsilon_from_above(counts, delta):
    """Gaussians with noise z_i are one with mu = sqrt(sum 1 / z_i^2); Balle and Wang, ICML 2018:
    delta(eps) = Phi(mu / 2 - eps / mu) - e^eps Phi(-mu / 2 - eps / mu)."""
    mu = math.sqrt(sum(n / z**2 for z, n in counts.items()))

    def excess(eps: float) -> float:
        tail = math.exp(eps + stats.norm.logcdf(-mu / 2 - eps / mu))
        return stats.norm.cdf(mu / 2 - eps / mu) - tail - delta

    exact = optimize.brentq(excess, 0, 500)
    assert exact <= epsilon(counts, delta) <= 1.1 * exact


def test_no_release_costs_nothing_and_one_without_noise_everything():
    assert epsilon({}, 1e-5) == epsilon({1.0: 0, 0.0: 0}, 1e-5) == 0
    assert epsilon({1.0: 3, 0.0: 1}, 1e-5) == math.inf
