"""Draws random numbers as pure functions of a key: a draw depends on its purpose, not on the draws
before it.

A key is a 0-d int64 tensor. Under vmap every client has its own key and draws the same numbers as
by itself. The generator is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable

import torch
from torch import Tensor

# (flat tree, standard deviation, key) -> the tree in Gaussian noise
Noised = Callable[[dict[str, Tensor], float, Tensor], dict[str, Tensor]]
GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _shift(word: Tensor, by: int) -> Tensor:
    """Logical shift to the right; torch's is arithmetic."""
    return (word >> by).bitwise_and_((1 << (64 - by)) - 1)


def _mixed(word: Tensor) -> Tensor:
    # In place after the first operation: page faults of fresh memory take longer than the
    # arithmetic.
    word = _shift(word, 30).bitwise_xor_(word).mul_(_signed(_MIX1))
    word = _shift(word, 27).bitwise_xor_(word).mul_(_signed(_MIX2))
    return _shift(word, 31).bitwise_xor_(word)


def fold(key: Tensor, at: int | str | Tensor) -> Tensor:
    """The key that belongs to `key` and a number or a word.

    A tensor of numbers gives a tensor of keys.
    """
    return _mixed(
        _mixed(key + _signed(GOLDEN)) + (zlib.crc32(at.encode()) if isinstance(at, str) else at)
    )


def step_key(key: Tensor, step: int | Tensor, scope: int = 0) -> Tensor:
    """The key of a step of training, and of a component in it (`scope`)."""
    return fold(fold(fold(key, "step"), step), scope)


def identity(component: object) -> int:
    """The number of a component, from its class, so that its name in a recipe changes no bit.

    A variant has the number of the method that it inherits. The two then differ only in what the
    variant changes.
    """
    methods = [kind for kind in type(component).__mro__ if vars(kind).get("name")]
    return zlib.crc32((methods or [type(component)])[-1].__name__.encode())


def uniform(key: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in [0, 1), of 24 random bits each, the same in every dtype.

    Keys [...] give [..., *shape].
    """
    count = torch.arange(1, math.prod(shape) + 1, device=key.device).mul_(_signed(GOLDEN))
    return (
        _shift(_mixed(key.unsqueeze(-1) + count), 40)
        .to(dtype)
        .mul_(2.0**-24)
        .reshape(key.shape + shape)
    )


def normal(key: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers (Box and Muller 1958), two from two uniform ones.

    A longer draw begins the same way.
    """
    count = math.prod(shape)
    u, v = uniform(key, -(-count // 2), 2, dtype=torch.float64).unbind(1)
    radius, angle = torch.sqrt(-2 * torch.log1p(-u)), 2 * math.pi * v
    pairs = torch.stack([radius * torch.cos(angle), radius * torch.sin(angle)], dim=1)
    return pairs.flatten()[:count].to(dtype).reshape(shape)


def permutation(key: Tensor, n: int) -> Tensor:
    """The numbers from 0 to `n` - 1 in random order."""
    return uniform(key, n).argsort(stable=True)


def integers(key: Tensor, high: int, *shape: int) -> Tensor:
    """Whole numbers from 0 to `high` - 1, as int64."""
    return (uniform(key, *shape, dtype=torch.float64) * high).long()


def noised(tree: dict[str, Tensor], std: float, key: Tensor) -> dict[str, Tensor]:
    """The tensors of a flat tree in Gaussian noise; each name has noise of its own.

    Who knows the seed can draw this noise too: it protects nobody outside of a simulation.
    """
    return {name: noisy(leaf, std, fold(key, name)) for name, leaf in tree.items()}


def noisy(x: Tensor, std: float | Tensor, key: Tensor) -> Tensor:
    """x + std eps with eps ~ N(0, 1), [...]; where `std` is 0 it is x."""
    return x + std * normal(key, *x.shape, dtype=x.dtype)
