"""Adds up clients' tensors exactly: the same bits in every order, in any parts, on any device.

An addend weights[k] * x_k is rounded once, to a multiple of 2^-s, and added as a 64-bit integer.
The sum of all |weights| decides s, such that addends with |x| <= 2^6 can't overflow. A row of a
tensor that reaches further is rounded to a multiple of 2^(24 - s), 2^(48 - s) and so on, and such
rows are added by themselves. So no row costs another one a bit. Every number up to 2^126 is
taken. A larger one makes the sum NaN, as infinity and NaN do.

Of float32, products with the weights are exact in float64, since weights are rounded to 29 bits
first. So it does not matter whether a device fuses product and sum. Of float64, weights stay as
they are, and what the rounding takes away is added by itself, to 40 more bits.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
from collections.abc import Callable, Sequence
from functools import cache, reduce
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from fedml_noniid.core import native
from fedml_noniid.core.trees import Rows, Tree, leaf_row_norms, opened, tree_map

SOURCE = Path(__file__).with_name("sums.cpp")
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
SUM_BITS = 62  # of an int64: one is the sign's, one is left
# Rows whose numbers don't exceed 2^NEAR are level 0, those up to 2^(NEAR + STEP) are level 1, ...
NEAR, STEP, LEVELS = 6, 24, 6
SPLIT = 10  # bits of the lower part of a sum: with REST, each part is exact in float64
REST = 40  # bits behind the point that float64 keeps of an addend
SHORT = 2.0**24 + 1  # leaves the upper 29 of a float64's 53 bits
SMALLEST = 2.0**-100  # of all weights together, so that the scale stays finite
PIECE = 8192  # numbers of each row at a time in torch, so that they stay in the cache
ON_GPU = 2**24  # numbers of all rows at a time: few kernels, in bounded memory


class Weights(NamedTuple):
    """Holds clients' weights as they multiply numbers of one dtype."""

    factors: Tensor  # [M], float64: omega 2^s
    unit: Tensor  # 0-d, what the sum of the rounded products is multiplied by

    @staticmethod
    def from_numbers(
        weights: Tensor, dtype: torch.dtype, divided: bool, total: float | None = None
    ) -> Weights:
        """`divided`: whether the sum is divided by that of the weights [M]. `total`: the sum of the
        weights' sizes, if others have some of the weights."""
        omega = weights.double()
        size = omega.abs().sum() if total is None else omega.new_tensor(total)
        size = size.clamp(min=SMALLEST)
        if dtype != torch.float64:
            high = omega * SHORT
            omega = high - (high - omega)
        mantissa, _ = torch.frexp(size)  # size / mantissa is the next power of 2
        scale = 2.0 ** (SUM_BITS - NEAR) * (mantissa / size)
        factors = omega * scale
        return Weights(factors, 1 / (factors.round().long().sum().double() if divided else scale))


# By level: the sum of the rounded numbers, int64 [P], and of what float64 keeps behind the point.
# LEVELS, if it is there: NaN.
Parts = dict[int, tuple[Tensor, Tensor | None]]


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


def level(row: Tensor) -> int:
    """The level at which a tensor is added; LEVELS if a sum with it would be NaN."""
    return int(_levels(_largest(row.reshape(1, -1))))


def addend(row: Tensor, omega: float, total: float, level: int) -> list[Tensor]:
    """What a client adds at its level to a sum by weights that add up to `total`, its own being
    `omega`: its rounded product, int64 [P], and of float64 what rounding takes away."""
    weights = torch.tensor([omega / 2.0 ** (STEP * level)], dtype=torch.float64, device=row.device)
    factors = Weights.from_numbers(weights, row.dtype, False, total).factors
    return [part for part in _rounded(row.reshape(1, -1), factors, PIECE, _sum) if part is not None]


def integers(rows: Tensor, n: int) -> Tensor:
    """The sum of M of `n` rows in which rows come and go, [M, ...] -> int64 [LEVELS + 1, ...].

    Add what comes, subtract what goes: `from_integers` has the bits of `added` of the rows there,
    if they are float32.
    """
    flat = rows.reshape(len(rows), rows.shape[1:].numel())
    factors = flat.new_full((len(flat),), _scale(n), dtype=torch.float64)
    level, (counts, _) = _by_level(flat, factors)
    counts[LEVELS] = (level == LEVELS).sum()  # rows that make the sum NaN
    return counts.reshape(LEVELS + 1, *rows.shape[1:])


def from_integers(counts: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """The sum of `n` rows, [...], of their `integers`."""
    parts: Parts = {at: (counts[at], None) for at in range(LEVELS)}
    parts[LEVELS] = 0.0 / (counts[LEVELS] == 0), None  # 0, or NaN
    return (_value(parts) / _scale(n)).to(dtype)


def _scale(n: int) -> float:
    """2^s where `n` weights are 1, as in `Weights.from_numbers`."""
    return 2.0 ** (SUM_BITS - NEAR - math.frexp(n)[1])


class Growing:
    """Adds the rows of a tensor up as they come, in any order and in several processes.

    It stands in a Reply in place of the tensor, [M, ...], where only sums by these weights and
    norms are taken.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, omega: Tensor) -> None:
        """`shape`, `dtype`: of a row. `omega` [M]: the weights."""
        self.dtype, self.shape, self._sent = dtype, (len(omega), *shape), 0
        self.norms = omega.new_zeros(len(omega), dtype=dtype)
        self._omega, self._factors = omega, Weights.from_numbers(omega, dtype, False).factors
        self._parts: Parts = {}

    def numel(self) -> int:
        return math.prod(self.shape)

    def element_size(self) -> int:
        """The bytes in which a client has sent a number."""
        return self._sent or self.dtype.itemsize

    def put(self, position: int, row: Tensor) -> None:
        """Adds the row of one position."""
        rows = row.reshape(1, -1)
        at = slice(position, position + 1)
        self.norms[at] = leaf_row_norms(rows)
        _absorb(self._parts, _parts(rows, self._factors[at]))

    def total(self, divided: bool) -> Tensor:
        """The sum of all rows, [...]."""
        weights = Weights.from_numbers(self._omega, self.dtype, divided)
        return (_value(self._parts) * weights.unit).to(self.dtype).reshape(self.shape[1:])

    def put_sum(self, level: int, addends: Sequence[Tensor]) -> None:
        """Adds the sum of all clients' addends at a level, which they have sent in place of their
        rows; the lengths of the rows stay 0."""
        self._sent += sum(addend.element_size() for addend in addends)
        _absorb(self._parts, {level: (addends[0], addends[1] if len(addends) > 1 else None)})

    def state(self) -> Tree:
        """What another process absorbs."""
        return {
            "norms": self.norms,
            "omega": self._omega,
            "shape": torch.tensor(self.shape[1:]),
            "sums": {
                str(level): {str(i): leaf for i, leaf in enumerate(parts) if leaf is not None}
                for level, parts in self._parts.items()
            },
        }

    def absorb(self, state: Tree) -> None:
        """Adds the rows of another process."""
        self.norms = self.norms + state["norms"]
        for level, parts in state["sums"].items():
            _absorb(self._parts, {int(level): (parts["0"].clone(), parts.get("1"))})


def _total(weights: Tensor | None, stacked: Tree, divided: bool) -> Tree:
    made: dict[torch.dtype, Weights] = {}

    def total(tensor: Tensor | Rows) -> Tensor:
        leaf = opened(tensor, weights)
        if weights is not None and weights.shape != leaf.shape[:1]:
            raise ValueError(f"{list(weights.shape)} weights for rows {list(leaf.shape)}")
        if isinstance(leaf, Growing):
            return leaf.total(divided)
        if leaf.dtype not in made:
            omega = leaf.new_ones(len(leaf)) if weights is None else weights
            made[leaf.dtype] = Weights.from_numbers(omega, leaf.dtype, divided)
        weighting, rows = made[leaf.dtype], leaf.reshape(len(leaf), leaf.shape[1:].numel())
        parts = (_parts_of_all_levels if rows.is_cuda else _parts)(rows, weighting.factors)
        return (_value(parts) * weighting.unit).to(leaf.dtype).reshape(leaf.shape[1:])

    return tree_map(total, stacked)


def _parts(rows: Tensor, factors: Tensor) -> Parts:
    """The sums of row k times factors[k], each product rounded, of [M, P]; on the CPU. Level 0 is
    always there."""
    whole = _compiled(rows, factors)
    if whole is not None:
        return {0: (whole, None)}
    if bool((_largest(rows) <= 2.0**NEAR).all()):
        return {0: _rounded(rows, factors, PIECE, _sum)}
    return _parts_of_all_levels(rows, factors)


def _parts_of_all_levels(rows: Tensor, factors: Tensor) -> Parts:
    """The same without a look at the rows, for which the host would wait for a GPU."""
    level, (whole, rest) = _by_level(rows, factors)
    parts = {at: (whole[at], None if rest is None else rest[at]) for at in range(LEVELS)}
    return parts | {LEVELS: (0.0 / (level != LEVELS).all(), None)}  # 0, or NaN


def _by_level(rows: Tensor, factors: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
    """(the level of each row [M], the sums of their products by level [LEVELS + 1, P])."""
    level = _levels(_largest(rows))
    units = factors.new_full((LEVELS + 1,), 2.0**STEP).cumprod(0) / 2.0**STEP

    def by_level(rounded: Tensor) -> Tensor:
        return rounded.new_zeros(LEVELS + 1, rounded.shape[1]).index_add_(0, level, rounded)

    size = max(PIECE, ON_GPU // max(len(rows), 1)) if rows.is_cuda else PIECE
    return level, _rounded(rows, factors / units[level], size, by_level)


def _levels(most: Tensor) -> Tensor:
    """The level of rows whose largest number is `most`, [M]; LEVELS for NaN and beyond the last."""
    edges = most.new_full((LEVELS,), 2.0**STEP).cumprod(0) * 2.0 ** (NEAR - STEP)
    return torch.searchsorted(edges, most)


def _rounded(
    rows: Tensor, factors: Tensor, size: int, adds: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor | None]:
    """What `adds` makes of the rounded products, `size` columns at a time, and of what rounding
    took away; the last of float64 only."""
    wholes, rests = [], []
    for at in range(0, max(rows.shape[1], 1), size):
        products = rows[:, at : at + size].double() * factors.unsqueeze(1)
        whole = products.round()
        wholes.append(adds(whole.long()))
        if rows.dtype == torch.float64:
            rests.append(adds(((products - whole) * 2.0**REST).round().long()))
    return torch.cat(wholes, dim=-1), torch.cat(rests, dim=-1) if rests else None


def _sum(rounded: Tensor) -> Tensor:
    return rounded.sum(0)


def _absorb(parts: Parts, others: Parts) -> None:
    """Adds the sums of other rows."""
    for level, (whole, rest) in others.items():
        old = parts.get(level)
        if old is not None:
            whole = old[0].add_(whole)
            rest = None if old[1] is None or rest is None else old[1] + rest
        parts[level] = whole, rest


def _value(parts: Parts) -> Tensor:
    """The sum of all parts, [P], float64."""
    levels = sorted(parts.keys() - {LEVELS})
    if levels == [0]:
        total = _exact(*parts[0])
    else:
        wholes, rests = zip(*(parts[level] for level in levels), strict=True)
        rest = None if rests[0] is None else torch.stack(rests)
        exact, units = _exact(torch.stack(wholes), rest), (2.0 ** (STEP * at) for at in levels)
        total = reduce(torch.add, (part * unit for part, unit in zip(exact, units, strict=True)))
    return total + parts[LEVELS][0] if LEVELS in parts else total


def _exact(whole: Tensor, rest: Tensor | None) -> Tensor:
    """The float64 nearest to a sum and what it keeps behind the point."""
    if rest is None:
        return whole.double()
    whole, rest = whole + (rest >> REST), rest & ((1 << REST) - 1)
    upper = whole >> SPLIT << SPLIT
    return upper.double() + (((whole - upper) << REST) + rest).double() / 2.0**REST


def _largest(rows: Tensor) -> Tensor:
    """The largest |x| of each row, [M, P] -> [M], float64; NaN if there is one."""
    if not rows.numel():
        return rows.new_zeros(len(rows), dtype=torch.float64)
    low, high = torch.aminmax(rows, dim=1)
    return torch.maximum(high, -low).double()


def _compiled(rows: Tensor, factors: Tensor) -> Tensor | None:
    """As `_rounded` at level 0, several times as fast; None if rows reach too far, or without a
    compiler."""
    add = _library() if rows.dtype == torch.float32 else None
    if add is None:
        return None
    (m, n), rows = rows.shape, rows.contiguous()
    added = rows.new_zeros(n, dtype=torch.int64)
    most = add(added.data_ptr(), rows.data_ptr(), factors.data_ptr(), m, n)
    return added if most <= 2.0**NEAR else None


def compiled_sha256() -> str:
    """Returns the SHA-256 of the library that adds up in this process; "" if Python does."""
    path = native.library(SOURCE, FLAGS)
    return hashlib.sha256(path.read_bytes()).hexdigest() if _library() is not None else ""


@cache
def _library() -> Callable[..., float] | None:
    """The function of sums.cpp, if this machine has it compiled, or has a compiler."""
    if (library := native.loaded(SOURCE, FLAGS)) is None:
        return None
    library.add_rows.argtypes = [*[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2]
    library.add_rows.restype = ctypes.c_float
    return cast("Callable[..., float]", library.add_rows)
