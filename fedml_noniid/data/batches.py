"""Batches as lists of indices: the samples of a client and their order depend only on (seed, round,
client)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fedml_noniid.data.types import Ints

MOST_READ = 100_000_000  # samples of a client in a round: their order takes 0.8 GB


@dataclass(frozen=True)
class Order:
    """Positions in the order of reading, and the sizes of the batches."""

    index: Ints  # [sum of sizes] int64
    sizes: tuple[int, ...]
    personal: int = 0  # first batches, which train the personal parts alone


def epochs(
    indices: Ints,
    n_epochs: int,
    batch_size: int,
    rng: np.random.Generator,
    steps: int = 0,
    drop_last: bool = False,
    personal: int = 0,
) -> Order:
    """`n_epochs` passes over `indices`, each in a new order; if `steps` is above 0, that many
    batches instead.

    The last, short batch of a pass is kept unless `drop_last`. A client with less than one full
    batch keeps that batch. `personal`: first passes for the personal parts; they leave one batch.
    """
    n = len(indices)
    sizes, used = _sizes(n, batch_size, drop_last)
    n_epochs = passes(n, n_epochs, batch_size, steps, drop_last)
    if n_epochs == 1:
        index = _shuffled(indices, rng)[:used]
    else:
        index = np.concatenate(
            [indices[:0], *(_shuffled(indices, rng)[:used] for _ in range(n_epochs))]
        )
    taken = (sizes * n_epochs)[: steps or None]
    first = min(personal * len(sizes), len(taken) - 1)
    return Order(index[: sum(taken)], taken, first)


def passes(n: int, n_epochs: int, batch_size: int, steps: int = 0, drop_last: bool = False) -> int:
    """How many passes over `n` samples `epochs` begins: so often a sample is read, at most."""
    return -(-steps // len(_sizes(n, batch_size, drop_last)[0])) if steps else n_epochs


def in_order(indices: Ints, batch_size: int) -> Order:
    """One pass over `indices` as they stand."""
    return Order(indices, _sizes(len(indices), batch_size)[0])


def padded(orders: list[Order]) -> tuple[Ints, NDArray[np.bool_]]:
    """Several orders as index [M, S, B] and mask [M, S, B] (True for a sample); padding points at
    position 0."""
    sizes = orders[0].sizes
    if all(order.sizes == sizes for order in orders) and len(set(sizes)) == 1:  # nothing to pad
        index = np.concatenate([order.index for order in orders]).reshape(
            len(orders), len(sizes), sizes[0]
        )
        return index, np.ones(index.shape, dtype=bool)
    n_steps = max(len(order.sizes) for order in orders)
    batch = max(max(order.sizes, default=0) for order in orders)
    index = np.zeros((len(orders), n_steps, batch), dtype=np.int64)
    mask = np.zeros(index.shape, dtype=bool)
    for row, order in enumerate(orders):
        row_sizes = np.zeros(n_steps, dtype=np.int64)
        row_sizes[: len(order.sizes)] = order.sizes
        mask[row] = np.arange(batch) < row_sizes[:, None]
        index[row][mask[row]] = order.index
    return index, mask


def _shuffled(indices: Ints, rng: np.random.Generator) -> Ints:
    """indices[rng.permutation(len(indices))], a fifth quicker for a hundred."""
    order = indices.copy()
    rng.shuffle(order)
    return order


@cache
def _sizes(n: int, batch_size: int, drop_last: bool = False) -> tuple[tuple[int, ...], int]:
    """The sizes of the batches that `n` samples are cut into, and their sum."""
    full, rest = divmod(n, batch_size)
    if drop_last and full:
        return (batch_size,) * full, batch_size * full
    return (batch_size,) * full + ((rest,) if rest else ()), n
