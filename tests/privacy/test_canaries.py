"""The attack finds canaries where there is no noise. It refutes no epsilon that holds."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedml_noniid.core import randomness
from tests.privacy.canaries import DELTA, Setting, lower_bound, moves

pytest.importorskip("dp_accounting", reason="epsilon needs the extra [privacy]")
RUNS = {"dpsgd": 500, "dpfedavg": 120}


def attacked(method: str, noise: float, releases: int = 1) -> tuple[float, float]:
    """(stated epsilon, lower bound)."""
    without, there, stated = moves(Setting(method, noise, releases), RUNS[method], 0)
    return stated, lower_bound(without, there, DELTA)


@pytest.mark.parametrize("method", RUNS)
def test_without_noise_it_finds_the_canary(method: str) -> None:
    """It never errs in n runs, and 97.5 % bound both rates by 1 - 0.025^(1 / n)."""
    stated, found = attacked(method, 0.0)
    rate = 1 - 0.025 ** (2 / RUNS[method])
    assert stated == math.inf and found == pytest.approx(math.log((1 - DELTA - rate) / rate))


@pytest.mark.parametrize("method", RUNS)
def test_it_refutes_no_stated_epsilon(method: str) -> None:
    stated, found = attacked(method, 0.5)
    assert 0.5 < found <= stated


@pytest.mark.parametrize("method", RUNS)
def test_it_refutes_one_if_the_noise_is_a_tenth_of_what_is_stated(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy = randomness.noisy
    monkeypatch.setattr(randomness, "noisy", lambda x, std, key: noisy(x, std / 10, key))
    stated, found = attacked(method, 4.0)
    assert found > 1.2 * stated


def test_a_lower_bound_of_gaussians_is_below_what_they_give() -> None:
    """N(0, 1) and N(mu, 1) are (mu^2 / 2 + mu sqrt(2 ln(1 / delta)), delta)-private. Equal scores
    give 0."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 4000))
    for mu in (0.5, 1.0, 3.0):
        exact = mu**2 / 2 + mu * math.sqrt(2 * math.log(1 / DELTA))
        assert 0 < lower_bound(a, b + mu, DELTA) < exact
    assert lower_bound(a, b, DELTA) == lower_bound(np.zeros(99), np.zeros(99), DELTA) == 0
