"""A silo's reply as one vector of 64-bit integers, and the sum of such vectors as the sums of
replies: `plugins.core.sums` in pieces."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.core.sums import Growing, addend, level
from fedml_noniid.plugins.core.trees import Params, Tree
from fedml_noniid.plugins.engines.packing import flatten, unflatten
from fedml_noniid.plugins.engines.streaming import ADDED, Weighing
from fedml_noniid.plugins.silo.wire import MAX_MAGNITUDE, REMEDY

LEVELS = 2  # numbers up to 64, and up to MAX_MAGNITUDE; no upload has larger ones


def levels(leaves: Params) -> Tensor:
    """The level of each tensor of a flat reply, uint8 [T]: 0 if its numbers are at most 64.

    UserError if a tensor can't be added up. The server reads the words, so they have no number.
    """
    found = {key: level(leaf) for key, leaf in added(leaves).items()}
    for key, at in found.items():
        if at >= LEVELS:
            raise UserError(
                f"{key!r} is not finite, or has numbers beyond {MAX_MAGNITUDE:g}: it can't be "
                f"added up; {REMEDY}"
            )
    return torch.tensor([*found.values()], dtype=torch.uint8)


def together(levels: Tensor) -> Tensor:
    """The levels at which there are tensors of any silo, bool [T, LEVELS]; `levels`: [M, T]."""
    return (levels.long().unsqueeze(2) == torch.arange(LEVELS)).any(0)


def length(leaves: Params, there: Tensor) -> int:
    """The numbers in the vector of a reply with these tensors; `there`: as from `together`."""
    sizes = [leaf.numel() * _pieces(leaf.dtype) for leaf in added(leaves).values()]
    return sum(size * n for size, n in zip(sizes, there.sum(1).tolist(), strict=True))


def packed(
    leaves: Params, own: Tensor, by: Weighing, total: float, there: Tensor, silos: int
) -> Tensor:
    """The vector of a flat reply for a sum over `silos` whose n_k add up to `total`, int64 [L].

    `own`: the `levels` of the reply. `there`: those of all silos, see `together`.
    """
    n, parts = leaves["n"].item(), [torch.zeros(0, dtype=torch.int64)]
    for (key, leaf), mine, at in zip(added(leaves).items(), own.tolist(), there, strict=True):
        omega, of = (1, silos) if by.ones(key) else (n, total)
        zeros = [torch.zeros(leaf.numel(), dtype=torch.int64)] * _pieces(leaf.dtype)
        for level_ in at.nonzero().flatten().tolist():
            parts += addend(leaf, omega, of, mine) if level_ == mine else zeros
    return torch.cat(parts)


def sums(vector: Tensor, schema: Tree, by: Weighing, there: Tensor, n: Tensor) -> Tree:
    """The parts of a Reply in the sum of all silos' vectors; `n` [M]: their samples."""
    found, place = {}, 0
    for (key, leaf), at in zip(added(flatten(schema)).items(), there, strict=True):
        found[key] = Growing(leaf.shape, leaf.dtype, by.omega(key, n))
        for level_ in at.nonzero().flatten().tolist():
            size = leaf.numel() * _pieces(leaf.dtype)
            pieces = vector[place : place + size].chunk(_pieces(leaf.dtype))
            found[key].put_sum(level_, pieces)
            place += size
    # A Growing stands in a Reply in place of a tensor.
    return unflatten(cast("Params", found), {key: schema[key] for key in ADDED})


def added(leaves: Params) -> Params:
    """The tensors of a flat reply that are added up, by name, in an order of their own."""
    return {key: leaves[key] for key in sorted(leaves) if key.partition("/")[0] in ADDED}


def _pieces(dtype: torch.dtype) -> int:
    """How many integers stand for a number: of float64, what rounding takes away is a second."""
    return 2 if dtype == torch.float64 else 1
