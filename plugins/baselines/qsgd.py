"""QSGD: numbers rounded at random to a few bits.
Alistarh, Grubic, Li, Tomioka, Vojnovic: QSGD: Communication-Efficient SGD via Gradient Quantization
and Encoding, NeurIPS 2017. https://arxiv.org/abs/1610.02132

The quantisation function of section 3.1, Q_s(v_i) = ||v|| sgn(v_i) xi_i, of the update w_k - w_t,
with s = 2^(bits - 1) - 1. It is unbiased, so there is no error feedback.
- ||v|| is the largest magnitude, as in the paper's experiments, and of each tensor in place of
  buckets of a fixed size.
- Each number takes `bits` bits. The paper's Elias coding gains where most numbers round to 0, as
  they do with the Euclidean norm. 4 bits are ours.

Meeting others: see `compression`. Its FedML pair is `make_pair("qsgd")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedml_noniid.core.component import Client, Component, Exclusive
from fedml_noniid.core.options import Range
from fedml_noniid.core.randomness import fold, uniform
from fedml_noniid.core.trees import Params
from fedml_noniid.plugins.baselines.compression import Grid, largest


@dataclass(frozen=True)
class QSGD(Component):
    """Rounds each number of an update at random to a point of a grid, without bias."""

    name: ClassVar[str] = "qsgd"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.UPDATE})

    bits: Annotated[int, Range(2, 8)] = 4

    @property
    def packing(self) -> Grid:
        return Grid(self.bits, last=2**self.bits - 2)

    def leaving(self, delta: Params, client: Client) -> Params:
        """||v|| sgn(v_i) xi_i: xi_i is a neighbour of s |v_i| / ||v|| on the grid, over s."""
        grid, rounded, s = self.packing, {}, self.packing.last // 2
        for name, leaf in delta.items():
            norm = largest(leaf)
            level = s * (leaf.abs() / norm).nan_to_num()
            draw = uniform(fold(client.key, name), *leaf.shape, dtype=leaf.dtype)
            xi = level.floor() + (draw < level.frac())
            rounded[name] = grid.point(s + leaf.sign() * xi, norm)
        return rounded
