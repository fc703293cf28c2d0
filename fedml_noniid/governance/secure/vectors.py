"""A silo's reply as one vector of 64-bit integers, and the sum of such vectors as the sums of
replies: `core.sums` in pieces."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.sums import STEP, Growing, Weights, addend, level
from fedml_noniid.core.trees import Params, Tree
from fedml_noniid.deploy import outliers
from fedml_noniid.deploy.wire import MAX_MAGNITUDE, REMEDY
from fedml_noniid.engines.packing import flatten, unflatten
from fedml_noniid.engines.streaming import ADDED, Weighing

LEVELS = 2  # numbers up to 64, and up to MAX_MAGNITUDE; no upload has larger ones


def levels(leaves: Params) -> Tensor:
    """The level of each tensor of a flat reply, uint8 [T]: 0 if its numbers are at most 64.

    UserError if a tensor can't be added up. The server reads the words, so they have no number.
    """
    by_key = {key: level(leaf) for key, leaf in added(leaves).items()}
    for key, at in by_key.items():
        if at >= LEVELS:
            raise UserError(
                f"{key!r} is not finite, or has numbers beyond {MAX_MAGNITUDE:g}: it can't be "
                f"added up; {REMEDY}"
            )
    return torch.tensor([*by_key.values()], dtype=torch.uint8)


def together(levels: Tensor) -> Tensor:
    """The levels at which there are tensors of any silo, bool [T, LEVELS]; `levels`: [M, T]."""
    return (levels.long().unsqueeze(2) == torch.arange(LEVELS)).any(0)


class Segment(NamedTuple):
    """A tensor at a level in the vector of a reply: its number of integers, in `pieces`."""

    key: str
    level: int
    pieces: int
    size: int


class Part(NamedTuple):
    """What is measured together in a vector. `whole`: not what rounding takes away."""

    name: str
    level: int
    whole: bool


def segments(leaves: Params, there: Tensor) -> list[Segment]:
    """The segments of the vector of a reply with these tensors; `there`: as from `together`."""
    return [
        Segment(key, level_, _pieces(leaf.dtype), leaf.numel() * _pieces(leaf.dtype))
        for (key, leaf), at in zip(added(leaves).items(), there, strict=True)
        for level_ in at.nonzero().flatten().tolist()
    ]


def parts(leaves: Params, there: Tensor) -> list[tuple[Part, int]]:
    """The part of the answer to which the numbers of a vector belong, from the first to the last,
    and how many follow each other."""
    return [
        (
            Part(outliers.part(segment.key), segment.level, piece == 0),
            segment.size // segment.pieces,
        )
        for segment in segments(leaves, there)
        for piece in range(segment.pieces)
    ]


def packed(
    leaves: Params, own: Tensor, by: Weighing, total: float, there: Tensor, silos: int
) -> Tensor:
    """The vector of a flat reply for a sum over `silos` whose n_k add up to `total`, int64 [L].

    `own`: the `levels` of the reply. `there`: those of all silos, see `together`.
    """
    n, parts = leaves["n"].item(), [torch.zeros(0, dtype=torch.int64)]
    for (key, leaf), mine, at in zip(added(leaves).items(), own.tolist(), there, strict=True):
        omega, whole = (1, silos) if by.ones(key) else (n, total)
        zeros = [torch.zeros(leaf.numel(), dtype=torch.int64)] * _pieces(leaf.dtype)
        for level_ in at.nonzero().flatten().tolist():
            parts += addend(leaf, omega, whole, mine) if level_ == mine else zeros
    return torch.cat(parts)


def sums(vector: Tensor, schema: Tree, by: Weighing, there: Tensor, n: Tensor) -> Tree:
    """The parts of a Reply in the sum of all silos' vectors; `n` [M]: their samples."""
    leaves = flatten(schema)
    growing = {
        key: Growing(leaf.shape, leaf.dtype, by.omega(key, n))
        for key, leaf in added(leaves).items()
    }
    laid_out = segments(leaves, there)
    for segment, numbers in zip(
        laid_out, torch.split(vector, [segment.size for segment in laid_out]), strict=True
    ):
        growing[segment.key].put_sum(segment.level, numbers.chunk(segment.pieces))
    # A Growing stands in a Reply in place of a tensor.
    return unflatten(cast("Params", growing), {key: schema[key] for key in ADDED})


def unit(by: Weighing, key: str, level_: int, n: float, total: float, silos: int) -> float:
    """What a number of the tensor `key` is multiplied by, before it is rounded to an integer at a
    level, by a silo with `n` of the `total` samples of `silos` silos."""
    omega, whole = (1.0, float(silos)) if by.ones(key) else (n, total)
    weights = torch.tensor([omega / 2.0 ** (STEP * level_)], dtype=torch.float64)
    return Weights.from_numbers(weights, torch.float64, False, whole).factors.item()


def added(leaves: Params) -> Params:
    """The tensors of a flat reply that are added up, by name, in an order of their own."""
    return {key: leaves[key] for key in sorted(leaves) if key.partition("/")[0] in ADDED}


def _pieces(dtype: torch.dtype) -> int:
    """How many integers stand for a number: of float64, what rounding takes away is a second."""
    return 2 if dtype == torch.float64 else 1
