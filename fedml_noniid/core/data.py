"""Defines samples, batches, and passes over them.

A batch knows its padding, so no method writes a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from itertools import repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.randomness import fold, permutation, step_key
from fedml_noniid.core.trees import Tree, add, leading, rows_at, tree_map


class Samples(NamedTuple):
    """A data set that sits on the device once."""

    x: Tensor  # [n, ...]
    y: Tensor  # [n]
    noise: Any = None  # feature skew, a `data.reading.Noise`: added to `x` at every read

    def to(self, device: torch.device) -> Samples:
        """The samples on a device."""
        noise = self.noise and self.noise._make(part.to(device) for part in self.noise)
        return Samples(self.x.to(device), self.y.to(device), noise)


# (samples, index [...], step) -> the samples as a client reads them in this step, [..., *shape].
Reader = Callable[[Samples, Tensor, int], Tensor]


class Batch(NamedTuple):
    """One mini-batch of one client."""

    x: Tensor  # [B, ...]
    y: Tensor  # [B]
    mask: Tensor | None = None  # [B], 0 for padding; None where nothing is padded
    live: Tensor | None = None  # 0-d bool; False: this client has no such step
    keys: Tensor | None = None  # 0-d, of this client and job; only in training
    step: int = 0
    scope: int = 0  # a component's number among the keys of the step

    @property
    def key(self) -> Any:
        """For `core.randomness`, 0-d: of this step, in a hook of this component; None if
        there is none."""
        return self.keys if self.keys is None else step_key(self.keys, self.step, self.scope)

    def sum(self, values: Tensor) -> Tensor:
        """Over the samples, [B, ...] -> [...]."""
        return (
            values.sum(0)
            if self.mask is None
            else torch.tensordot(self.mask.to(values.dtype), values, dims=1)
        )

    def mean(self, values: Tensor) -> Tensor:
        """Over the samples, [B, ...] -> [...]."""
        return masked_mean(values, self.mask)


@dataclass(frozen=True)
class Pass:
    """Batches as indices into samples: ragged (`sizes`, one flat index) or padded (`mask`, `live`).

    An engine that trains clients side by side has an axis [M] in front of every batch: [S, M, B]
    here.
    """

    samples: Samples
    index: Tensor  # [sum of sizes], or [S, B] when padded
    sizes: tuple[int, ...] | None = None
    mask: Tensor | None = None  # [S, B]
    live: Tensor | None = None  # [S] bool
    read: Reader | None = None  # None: samples are read as they are
    # [S] bool: whether a step trains the personal parts, or else the others; None: all together
    personal: Tensor | None = None

    def __len__(self) -> int:
        return len(self.sizes) if self.sizes is not None else self.index.shape[0]

    def __iter__(self) -> Iterator[Batch]:
        """The batches in their order.

        What all steps can share is made before the first one: a call of Python takes several times
        as long between two steps, whose tensors have taken the caches.
        """
        index, sizes = self.index, self.sizes
        labels = rows_at(self.samples.y, index)
        parts, ys = (
            leaf.unbind() if sizes is None else torch.split(leaf, list(sizes))
            for leaf in (index, labels)
        )
        xs = (self.inputs(part, s) for s, part in enumerate(parts))
        optional = (
            repeat(None) if leaf is None else leaf.unbind() for leaf in (self.mask, self.live)
        )
        return map(Batch, xs, ys, *optional)

    def inputs(self, index: Tensor, step: int) -> Tensor:
        """The samples of a batch, [B, ...]."""
        return (
            rows_at(self.samples.x, index)
            if self.read is None
            else self.read(self.samples, index, step)
        )

    @property
    def n(self) -> int | Tensor:
        """The number of samples."""
        return self.index.numel() if self.mask is None else self.mask.sum()

    def total(self, fn: Callable[[Batch], Tree]) -> Tree:
        """sum over batches of fn(batch)."""
        parts = map(fn, self)
        first = next(parts, None)
        if first is None:
            raise UserError(
                "a client without samples has no mean; every client needs at least one sample"
            )
        return reduce(add, parts, first)

    def mean(self, fn: Callable[[Batch], Tree]) -> Tree:
        """The mean over all samples of the trees fn(batch), leaves [B, ...] -> [...]."""
        n = self.n
        return tree_map(
            lambda leaf: leaf / n, self.total(lambda batch: tree_map(batch.sum, fn(batch)))
        )

    def class_counts(self, n_classes: int) -> Tensor:
        """n_c, the number of samples of each class, [C] float64. Reads labels only.

        UserError if targets are no classes.
        """
        if self.samples.y.is_floating_point():
            raise UserError("class_counts is for methods that declare Needs(classes=True)")
        member = one_hot(self.samples.y[self.index], n_classes, torch.float64)
        member = member if self.mask is None else member * self.mask.unsqueeze(-1)
        return member.reshape(-1, n_classes).sum(0)

    def shuffled(self, key: Tensor, epochs: int, batch_size: int) -> Iterator[Batch]:
        """Epochs over a pass without padding (the public split), each in a new order."""
        x, y, _ = self.samples
        for epoch in range(epochs):
            order = self.index[permutation(fold(key, epoch), len(self.index))]
            yield from (
                Batch(rows_at(x, index), rows_at(y, index))
                for index in torch.split(order, batch_size)
            )


def masked_mean(values: Tensor, mask: Tensor | None, axes: int = 0) -> Tensor:
    """Mean over the rows whose mask is 1; all rows when there is no mask. [B, ...] -> [...].

    `axes`: how many axes stand in front of the batch, in `values` and `mask` [M, B] alike.
    """
    if mask is None:
        return values.mean(axes)
    mask = mask.to(values.dtype)
    # A batch of padding only has no mean. Its step is discarded, but it must not give NaN.
    total: Tensor = (leading(mask, values) * values).sum(axes)
    return total / leading(mask.sum(axes), total).clamp(min=1)


def one_hot(y: Tensor, n_classes: int, dtype: torch.dtype) -> Tensor:
    """1 where a label is the class, [...] -> [..., C].

    torch's own reads the values, which vmap can't under grad.
    """
    return (y.unsqueeze(-1) == torch.arange(n_classes, device=y.device)).to(dtype)


def cross_entropies(logits: Tensor, y: Tensor) -> Tensor:
    """-log p_y of each sample, [..., C] and [...] -> [...]."""
    return -log_softmax(logits).gather(0, y.reshape(1, -1)).reshape(y.shape)


def cross_entropy(logits: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the samples of a batch, [..., B, C] and [..., B] -> [...]."""
    return masked_mean(cross_entropies(logits, y), mask, y.ndim - 1)


def log_softmax(logits: Tensor) -> Tensor:
    """log p, class first, [..., C] -> [C, all the rest]: six times as fast as over the last axis.

    It goes through three axes, because torch transposes a matrix in blocks, which takes twice as
    long for ten columns.
    """
    by_class = logits.reshape(1, -1, logits.shape[-1]).permute(2, 0, 1).contiguous()
    return torch.log_softmax(by_class.squeeze(1), 0)
