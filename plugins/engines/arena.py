"""Memory laid out by hand: rows for the models of a cohort, and what forked processes share."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from plugins.core.trees import Params, Tree, tree_map

ALIGNED = 64  # bytes, as torch lays tensors: matrix products round differently elsewhere


def rows_for(like: Params, m: int, memory: Callable[[int], Tensor] | None = None) -> Params:
    """Room for `m` models, leaves [m, ...], each row of which lies as a tensor of its own would.

    `memory`: makes so many bytes, aligned; torch does, on the device of `like`, if None.
    """

    def rows(leaf: Tensor) -> Tensor:
        width = -(-leaf.numel() * leaf.element_size() // ALIGNED) * ALIGNED
        size = m * width
        flat = torch.empty(size, dtype=torch.uint8, device=leaf.device) if memory is None else memory(size)[:size]
        whole = flat.view(leaf.dtype).reshape(m, -1)
        return whole[:, : leaf.numel()].view(m, *leaf.shape)

    return {key: rows(leaf) for key, leaf in like.items()}


def shared(size: int) -> Tensor:
    """So many bytes that processes forked from here on see as well. Pages that nobody writes to take no memory.

    Not torch's own shared memory: that lies in /dev/shm, which containers bound to 64 MB.
    """
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, max(size, ALIGNED), flags=flags), dtype=torch.uint8)


class Place(NamedTuple):
    """Where a tensor lies in an arena."""

    offset: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype


class Arena:
    """`size` shared bytes, made before the fork."""

    def __init__(self, size: int) -> None:
        self._bytes = shared(size)
        self._used = 0

    def clear(self) -> None:
        """Empties the arena: the next tree overwrites what was put in before."""
        self._used = 0

    def put(self, tree: Tree) -> Tree:
        """Copies a tree in. Returns where its leaves are; what does not fit is an array of numpy's in their place."""
        return {key: self.put(leaf) if isinstance(leaf, dict) else self._leaf(leaf) for key, leaf in tree.items()}

    def get(self, places: Tree) -> Tree:
        """The tree that `put` told the places of, as views."""
        return {
            key: self.get(leaf)
            if isinstance(leaf, dict)
            else torch.from_numpy(leaf)
            if isinstance(leaf, np.ndarray)
            else self._view(leaf)
            for key, leaf in places.items()
        }

    def _leaf(self, leaf: Tensor) -> Place | NDArray[Any]:
        n = leaf.numel() * leaf.element_size()
        if self._used + n > len(self._bytes):
            array: NDArray[Any] = leaf.detach().contiguous().numpy()
            return array
        place = Place(self._used, tuple(leaf.shape), leaf.dtype)
        self._used += -(-n // ALIGNED) * ALIGNED
        self._view(place).copy_(leaf)
        return place

    def _view(self, place: Place) -> Tensor:
        n = place.dtype.itemsize
        for axis in place.shape:
            n *= axis
        return self._bytes[place.offset : place.offset + n].view(place.dtype).reshape(place.shape)


def replace_row(stacked: Tree, index: int, tree: Tree) -> None:
    """Writes `tree` into row `index` of a stacked tree, in place: for storage that is the engine's own."""
    tree_map(lambda rows, leaf: rows[index].copy_(leaf), stacked, tree)
