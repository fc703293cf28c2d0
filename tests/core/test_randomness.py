"""Random numbers as functions of a key: SplitMix64 in plain integers is the oracle."""

from __future__ import annotations

import math

import pytest
import torch

from fedml_noniid.core.randomness import fold, normal, uniform

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
KEYS = [0, 1, -1, 123456789, -(1 << 63), (1 << 63) - 1]


def mixed(z: int) -> int:
    """The finaliser of SplitMix64, as its authors print it."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def splitmix(seed: int, count: int) -> list[int]:
    return [mixed((seed + k * GOLDEN) & MASK) for k in range(1, count + 1)]


@pytest.mark.parametrize("key", KEYS)
def test_uniform_is_the_upper_24_bits_of_splitmix64(key: int) -> None:
    wanted = [word >> 40 for word in splitmix(key, 6)]
    found = uniform(torch.tensor(key), 2, 3, dtype=torch.float64)
    assert found.shape == (2, 3)
    assert (found.flatten() * 2**24).tolist() == wanted


def test_splitmix64_has_the_published_first_word() -> None:
    """Seed 0 begins with 0xE220A8397B1DCDAF, the reference value of its authors' code."""
    assert splitmix(0, 1) == [0xE220A8397B1DCDAF]


@pytest.mark.parametrize("key", KEYS)
def test_the_numbers_do_not_depend_on_the_precision(key: int) -> None:
    a, b = (uniform(torch.tensor(key), 50, dtype=dtype) for dtype in (torch.float32, torch.float64))
    assert torch.equal(a.double(), b)
    assert bool((a < 1).all()) and bool((a >= 0).all())


@pytest.mark.parametrize("key", KEYS)
def test_normal_numbers_are_box_and_mullers_pairs(key: int) -> None:
    """Words 1 and 2 make the first two numbers, words 3 and 4 the next; the last of five has no
    partner."""
    words = [(word >> 40) / 2**24 for word in splitmix(key, 6)]
    pairs = [
        (math.sqrt(-2 * math.log(1 - a)), 2 * math.pi * b)
        for a, b in zip(words[::2], words[1::2], strict=True)
    ]
    wanted = [radius * wave(angle) for radius, angle in pairs for wave in (math.cos, math.sin)]
    found = normal(torch.tensor(key), 5, 1, dtype=torch.float64)
    assert found.shape == (5, 1)
    assert found.flatten().tolist() == pytest.approx(wanted[:5], abs=1e-12)


def test_a_longer_draw_begins_with_the_shorter_one() -> None:
    """So that padding behind a batch changes none of its numbers."""
    key = torch.tensor(17)
    long = normal(key, 7, 3)
    assert all(torch.equal(normal(key, n, 3), long[:n]) for n in range(1, 8))


def test_under_vmap_each_client_draws_what_it_would_alone() -> None:
    keys = torch.tensor([4, 5, 6])
    together = torch.func.vmap(lambda key: normal(fold(key, 2), 4))(keys)
    assert torch.equal(together, torch.stack([normal(fold(key, 2), 4) for key in keys]))
