"""Adds up clients' tensors exactly: the same bits in every order, in any parts, on any device.

An addend weights[k] * x_k is rounded once, to a multiple of 2^-s, and added as a 64-bit integer.
The sum of all |weights| decides s, such that addends with |x| <= 2^6 can't overflow. A row of a
tensor that reaches further is rounded to a multiple of 2^(24 - s), 2^(48 - s) and so on, and such
rows are added by themselves. So no row costs another one a bit, and no finite number is refused up
to 2^126. Beyond, and for what is not finite, the sum is NaN.

Of float32, products with the weights are exact in float64, since weights are rounded to 29 bits
first. So it does not matter whether a device fuses product and sum. Of float64, weights stay as
they are, and what the rounding takes away is added by itself, to 40 more bits.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fedml_noniid.plugins.core import native
from fedml_noniid.plugins.core.trees import Rows, Tree, opened, tree_map

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
SUM_BITS = 62  # of an int64: one is the sign's, one is left
# Rows whose numbers don't exceed 2^NEAR are level 0, those up to 2^(NEAR + STEP) are level 1, ...
NEAR, STEP, LEVELS = 6, 24, 6
SPLIT = 20  # bits of the lower half of a sum
REST = 40  # bits behind the point that float64 keeps of an addend
SHORT = 2.0**24 + 1  # leaves the upper 29 of a float64's 53 bits
SMALLEST = 2.0**-100  # of all weights together, so that the scale stays finite
PIECE = 8192  # numbers of each row at a time in torch, so that they stay in the cache
ON_GPU = 2**24  # numbers of all rows at a time: few kernels, in bounded memory
MIN_COMPILED = 2**14  # numbers of a tensor from which the compiled lines pay


class Weights(NamedTuple):
    """Holds clients' weights as they multiply numbers of one dtype."""

    factors: Tensor  # [M], float64: omega 2^s
    unit: Tensor  # 0-d, what the sum of the rounded products is multiplied by

    @staticmethod
    def of(weights: Tensor, dtype: torch.dtype, divided: bool) -> Weights:
        """`divided`: whether the sum is divided by that of the weights [M]."""
        omega = weights.double()
        if dtype != torch.float64:
            high = omega * SHORT
            omega = high - (high - omega)
        total = omega.abs().sum().clamp(min=SMALLEST)
        mantissa, _ = torch.frexp(total)  # total / mantissa is the next power of 2
        scale = 2.0 ** (SUM_BITS - NEAR) * (mantissa / total)
        factors = omega * scale
        return Weights(factors, 1 / (factors.round().long().sum().double() if divided else scale))


def weighted_sum(weights: Tensor | None, stacked: Tree) -> Tree:
    """sum_k weights[k] * row k; `weights` is `[M]`, leaves are `[M, ...]`. None: all are 1."""
    return _total(weights, stacked, False)


def weighted_mean(weights: Tensor | None, stacked: Tree) -> Tree:
    """That sum, divided once by the sum of the weights."""
    return _total(weights, stacked, True)


def added(rows: Tensor | Rows) -> Tensor:
    """The sum of the rows, [M, ...] -> [...]."""
    total: Tensor = weighted_sum(None, {"": rows})[""]
    return total


def _total(weights: Tensor | None, stacked: Tree, divided: bool) -> Tree:
    made: dict[torch.dtype, Weights] = {}

    def total(given: Tensor | Rows) -> Tensor:
        leaf = opened(given)
        if leaf.dtype not in made:
            omega = leaf.new_ones(len(leaf)) if weights is None else weights
            made[leaf.dtype] = Weights.of(omega, leaf.dtype, divided)
        return _leaf_total(made[leaf.dtype], leaf)

    return tree_map(total, stacked)


def _leaf_total(weights: Weights, leaf: Tensor) -> Tensor:
    """[M, ...] -> [...]."""
    rows = leaf.reshape(len(leaf), leaf.shape[1:].numel())
    found = _compiled(rows, weights.factors)
    if found is None:
        found = _total_in_torch(rows, weights.factors)
    return (found * weights.unit).to(leaf.dtype).reshape(leaf.shape[1:])


def _total_in_torch(rows: Tensor, factors: Tensor) -> Tensor:
    """The sum of row k times factors[k], each product rounded, [M, P] -> [P], float64."""
    m, most = len(rows), _largest(rows)
    # On a GPU, the host would wait for the answer.
    if not rows.is_cuda and bool((most <= 2.0**NEAR).all()):
        return _by_level(rows, factors, PIECE, lambda rounded: rounded.sum(0, keepdim=True))[0]
    units = factors.new_full((LEVELS,), 2.0**STEP).cumprod(0) / 2.0**STEP
    beyond = torch.searchsorted(units * 2.0**NEAR, most)  # [M]; LEVELS for NaN
    level = beyond.clamp(max=LEVELS - 1)

    def added(rounded: Tensor) -> Tensor:
        return rounded.new_zeros(LEVELS, rounded.shape[1]).index_add_(0, level, rounded)

    size = max(PIECE, ON_GPU // max(m, 1)) if rows.is_cuda else PIECE
    found = _by_level(rows, factors / units[level], size, added)
    total = (found * units.unsqueeze(1)).sum(0)
    return total.masked_fill((beyond == LEVELS).any(), torch.nan)


def _by_level(
    rows: Tensor, factors: Tensor, size: int, added: Callable[[Tensor], Tensor]
) -> Tensor:
    """What `added` makes of the rounded products, int64 [M, P] -> [levels, P], as float64.

    `size`: columns at a time.
    """

    def total(part: Tensor) -> Tensor:
        products = part.double() * factors.unsqueeze(1)
        whole = products.round()
        found = added(whole.long())
        if rows.dtype != torch.float64:
            return found.double()
        rest = added(((products - whole) * 2.0**REST).round().long()).double() / 2.0**REST
        upper = found >> SPLIT << SPLIT  # each half is exact in float64
        return upper.double() + ((found - upper).double() + rest)

    starts = range(0, max(rows.shape[1], 1), size)
    return torch.cat([total(rows[:, at : at + size]) for at in starts], dim=1)


def _largest(rows: Tensor) -> Tensor:
    """The largest |x| of each row, [M, P] -> [M], float64; NaN if there is one."""
    if not rows.numel():
        return rows.new_zeros(len(rows), dtype=torch.float64)
    low, high = torch.aminmax(rows, dim=1)
    return torch.maximum(high, -low).double()


def _compiled(rows: Tensor, factors: Tensor) -> Tensor | None:
    """As `_total_in_torch`, several times as fast; None if rows reach too far, or without a
    compiler."""
    (m, n), worth = rows.shape, not rows.is_cuda and rows.numel() >= MIN_COMPILED
    add = _library() if worth and rows.dtype == torch.float32 else None
    if add is None:
        return None
    rows, added = rows.contiguous(), rows.new_zeros(n, dtype=torch.int64)
    most = add(added.data_ptr(), rows.data_ptr(), factors.data_ptr(), m, n)
    return added.double() if most <= 2.0**NEAR else None


@cache
def _library() -> Callable[..., float] | None:
    """The function of sums.cpp, if this machine has it compiled, or has a compiler."""
    path = native.library(SOURCE)
    if os.environ.get(native.SWITCH) == "0":
        return None
    if not path.exists() and not native.built(path, SOURCE, FLAGS):
        return None
    try:
        found = ctypes.CDLL(str(path)).add_rows
    except OSError as error:
        native.LOG.warning("sums run in Python: the compiled ones can't be loaded: %s", error)
        return None
    found.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2]
    found.restype = ctypes.c_float
    return cast("Callable[..., float]", found)
