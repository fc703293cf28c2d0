"""The attack finds canaries where there is no noise. It refutes no epsilon that holds."""

from __future__ import annotations

import math

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
