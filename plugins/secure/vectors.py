"""A silo's reply as one vector of 64-bit integers, and the sum of such vectors as the sums of
replies: `plugins.core.sums` in pieces."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from fedml_noniid.plugins.core.algorithm import TRAIN, Algorithm
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.core.sums import NEAR, Growing, addend
from fedml_noniid.plugins.core.trees import Params, Tree
from fedml_noniid.plugins.engines.packing import flatten, unflatten
from fedml_noniid.plugins.engines.streaming import ADDED


class Weighing(NamedTuple):
    """Says by which weights the replies to a job are added up: n_k, or 1."""

    uniform: bool
    unweighted: frozenset[str]  # components whose uploads are added up without weights

    @staticmethod
    def of(algorithm: Algorithm, job: str) -> Weighing:
        """Of a recipe; answers to other jobs than training have no weights."""
        names = frozenset(c.name for c in algorithm.components if c.needs.unweighted)
        return Weighing(algorithm.uniform or job != TRAIN, names)

    def ones(self, key: str) -> bool:
        """Whether the tensor `key` of a reply has the weight 1."""
        part, _, name = key.partition("/")
        return self.uniform or (part == "upload" and name.partition("/")[0] in self.unweighted)


def length(schema: Tree) -> int:
    """The numbers in the vector of a reply with this structure."""
    return sum(leaf.numel() * _pieces(leaf.dtype) for leaf in _added(schema).values())


def packed(reply: Tree, by: Weighing, total: float, silos: int) -> Tensor:
    """The vector of a reply for a sum over `silos` whose n_k add up to `total`, int64 [L].

    UserError if a number is out of the range of such sums.
    """
    n, parts = reply["n"].item(), [torch.zeros(0, dtype=torch.int64)]
    for key, leaf in _added(reply).items():
        found = addend(leaf, 1, silos) if by.ones(key) else addend(leaf, n, total)
        if not found:
            raise UserError(
                f"{key!r} has {leaf.abs().max().item():g}; allowed in a secure sum: at most "
                f"{2.0**NEAR:g}; lower the learning rate or the method's coefficients"
            )
        parts += found
    return torch.cat(parts)


def sums(vector: Tensor, schema: Tree, by: Weighing, n: Tensor) -> Tree:
    """The parts of a Reply in the sum of all silos' vectors; `n` [M]: their samples."""
    leaves = _added(schema)
    sizes = [leaf.numel() for leaf in leaves.values() for _ in range(_pieces(leaf.dtype))]
    pieces, found = iter(torch.split(vector, sizes)), {}
    for key, leaf in leaves.items():
        omega = (torch.ones_like(n) if by.ones(key) else n).double()
        found[key] = Growing(leaf.shape, leaf.dtype, omega)
        found[key].put_sum([next(pieces) for _ in range(_pieces(leaf.dtype))])
    # A Growing stands in a Reply in place of a tensor.
    return unflatten(cast("Params", found), {key: schema[key] for key in ADDED})


def _added(reply: Tree) -> Params:
    """The tensors of a reply that are added up, by name."""
    return flatten({key: reply[key] for key in ADDED})


def _pieces(dtype: torch.dtype) -> int:
    """How many integers stand for a number: of float64, what rounding takes away is a second."""
    return 2 if dtype == torch.float64 else 1
