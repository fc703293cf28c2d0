"""What methods that compress a client's update have in common: their compressors, which pack too,
and error feedback.

Only updates are compressed, and only on their way up. Running statistics, other methods' uploads
(SCAFFOLD's) and all that comes down travel as they are. A deployment sends the packed form, and a
simulation counts its bytes. Secure sums and local privacy noise (`ldp`) are refused beside them:
either changes every number, so nothing would be saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from fedml_noniid.core.component import Answer, Client, Component, Exclusive, Trace
from fedml_noniid.core.packing import Packing
from fedml_noniid.core.trees import Params, Tree, add, sub, zeros_like


def vector(tree: Params) -> Tensor:
    """All numbers as one vector [P], by name."""
    return torch.cat([tree[name].flatten() for name in sorted(tree)])


def shaped(numbers: Tensor, like: Params) -> Params:
    """The inverse of `vector`, for a tree of the structure `like`."""
    names = sorted(like)
    split = torch.split(numbers, [like[name].numel() for name in names])
    parts = dict(zip(names, split, strict=True))
    return {name: parts[name].reshape(leaf.shape).to(leaf.dtype) for name, leaf in like.items()}


@dataclass(frozen=True)
class Largest:
    """Keeps the k numbers of the largest magnitude, and of equal ones the first."""

    share: float  # k / P

    def __call__(self, p: Params) -> Params:
        numbers = vector(p)
        return shaped(torch.where(self._kept(numbers), numbers, 0) + 0.0, p)  # no -0.0

    def _kept(self, numbers: Tensor) -> Tensor:
        """Which k of the numbers are kept, bool [P]."""
        size, k = numbers.abs(), min(max(1, round(self.share * len(numbers))), len(numbers))
        least = size.topk(k).values[-1:]
        above, equal = size > least, size == least
        return above | (equal & (equal.cumsum(0) <= k - above.sum()))

    def pack(self, update: Params) -> Params:
        numbers = vector(update)
        index = self._kept(numbers).nonzero().squeeze(1)
        return {"index": index.int(), "values": numbers[index]}

    def unpack(self, packed: Params, like: Params) -> Params:
        zeros = torch.zeros_like(vector(like))
        index = packed["index"].long().clamp(0, len(zeros) - 1)
        return shaped(zeros.scatter(0, index, packed["values"]), like)


@dataclass(frozen=True)
class Grid:
    """Packs numbers that lie on the points 0 to `last`, evenly from -s to s, with one scale s for
    each tensor."""

    bits: int  # of a point's number
    last: int

    def point(self, number: Tensor, scale: Tensor) -> Tensor:
        """The point of each number; 0 has no sign."""
        half = self.last / 2
        return scale * ((number - half) / half) + 0.0

    def pack(self, update: Params) -> Params:
        scales = {name: largest(update[name]) for name in sorted(update)}
        numbers = [
            ((update[name].flatten() / scale).double().nan_to_num() + 1) * (self.last / 2)
            for name, scale in scales.items()
        ]
        bits = np.unpackbits(
            torch.cat(numbers).round().to(torch.uint8).numpy()[:, None],
            axis=1,
            count=self.bits,
            bitorder="little",
        )
        packed = torch.from_numpy(np.packbits(bits.ravel(), bitorder="little"))
        return {"numbers": packed, "scales": torch.stack([*scales.values()])}

    def unpack(self, packed: Params, like: Params) -> Params:
        count = self.bits * sum(leaf.numel() for leaf in like.values())
        bits = np.unpackbits(packed["numbers"].numpy(), count=count, bitorder="little")
        numbers = np.packbits(bits.reshape(-1, self.bits), axis=1, bitorder="little")[:, 0]
        tensors = shaped(torch.from_numpy(numbers), like)
        scales = dict(zip(sorted(like), packed["scales"], strict=True))
        return {name: self.point(leaf, scales[name]) for name, leaf in tensors.items()}


def largest(leaf: Tensor) -> Tensor:
    """The largest magnitude of a tensor, 0-d; 0 if it is empty."""
    return leaf.abs().amax() if leaf.numel() else leaf.new_zeros(())


class Compressor(Packing, Protocol):
    """Says what is sent of p, and packs it."""

    def __call__(self, p: Params) -> Params:
        """C(p)."""


@dataclass(frozen=True)
class ErrorFeedback(Component):
    """Sends C(p_k) of all that a client has not sent yet, and keeps the rest for its next round."""

    name: ClassVar[str]
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.UPDATE})

    @property
    def packing(self) -> Compressor:
        raise NotImplementedError

    def init_client(self, client: Client) -> Tree:
        """p_k of the last round; without C(p_k), which was sent, it is the error e_k."""
        return {"p": zeros_like(client.params)}

    def report(self, trace: Trace, client: Client) -> Answer:
        """p_k <- e_k + (w_k - w_t) with e_k = p_k - C(p_k)."""
        p = client.memory["p"]
        e = sub(p, self.packing(p))
        return Answer(memory={"p": add(e, sub(trace.params, client.params))})

    def leaving(self, delta: Params, client: Client) -> Params:
        """C(p_k)."""
        return self.packing(client.memory["p"])
