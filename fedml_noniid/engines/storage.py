"""Lays out memory: rows for the models of a cohort, and memory that forked processes share."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedml_noniid.core.trees import Params, Tree, leaves, tree_map

ALIGNED = 64  # bytes, as torch aligns tensors: at other addresses matrix products round differently


def rows_for(like: Params, m: int, memory: Callable[[int], Tensor] | None = None) -> Params:
    """Memory for `m` models, leaves [m, ...]; each row is aligned as a tensor of its own would be.

    `memory`: returns a given number of aligned bytes. None: torch takes the memory, on the device
    of `like`.
    """

    def rows(leaf: Tensor) -> Tensor:
        width = -(-leaf.numel() * leaf.element_size() // ALIGNED) * ALIGNED
        size = m * width
        flat = (
            torch.empty(size, dtype=torch.uint8, device=leaf.device)
            if memory is None
            else memory(size)[:size]
        )
        whole = flat.view(leaf.dtype).reshape(m, -1)
        return whole[:, : leaf.numel()].view(m, *leaf.shape)

    return tree_map(rows, like)


def unaliased(tree: Tree, scratch: Tree) -> Tree:
    """The tree, with copies of the leaves that lie in the memory of `scratch`, which is used
    again."""
    used = {_memory(leaf) for leaf in leaves(scratch) if isinstance(leaf, Tensor)}
    if used.isdisjoint(map(_memory, leaves(tree))):
        return tree
    return tree_map(lambda leaf: leaf.clone() if _memory(leaf) in used else leaf, tree)


def _memory(leaf: Tensor) -> int:
    """Identifies a tensor's memory, which its views share.

    A fake tensor has no address, but it has a storage.
    """
    address: int = leaf.untyped_storage()._cdata
    return address


def shared(size: int) -> Tensor:
    """`size` bytes that this process shares with those that it forks from here on.

    Unwritten pages take no memory.

    Torch's own shared memory lies in /dev/shm, which containers limit to 64 MB.
    """
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    return torch.frombuffer(mmap.mmap(-1, max(size, ALIGNED), flags=flags), dtype=torch.uint8)


class Slot(NamedTuple):
    """Says where a tensor lies in a shared storage."""

    offset: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype


class SharedStorage:
    """Stores trees in `size` shared bytes, made before the fork."""

    def __init__(self, size: int) -> None:
        self._bytes = shared(size)
        self._used = 0

    def clear(self) -> None:
        """Empties the storage: the next tree overwrites what was put in before."""
        self._used = 0

    def put(self, tree: Tree) -> Tree:
        """Copies a tree in and returns its slots.

        A leaf that does not fit is returned as an array of numpy's.
        """
        return tree_map(self._leaf, tree)

    def get(self, slots: Tree) -> Tree:
        """The tree whose slots `put` returned, as views."""
        return tree_map(
            lambda at: torch.from_numpy(at) if isinstance(at, np.ndarray) else self._view(at),
            slots,
        )

    def _leaf(self, leaf: Tensor) -> Any:
        """The leaf's Slot; where it does not fit, an array of numpy's."""
        n = leaf.numel() * leaf.element_size()
        if self._used + n > len(self._bytes):
            return leaf.detach().contiguous().numpy()
        slot = Slot(self._used, tuple(leaf.shape), leaf.dtype)
        self._used += -(-n // ALIGNED) * ALIGNED
        self._view(slot).copy_(leaf)
        return slot

    def _view(self, slot: Slot) -> Tensor:
        n = slot.dtype.itemsize * math.prod(slot.shape)
        return self._bytes[slot.offset : slot.offset + n].view(slot.dtype).reshape(slot.shape)


def replace_row(stacked: Tree, index: int, tree: Tree) -> None:
    """Writes `tree` into row `index` of a stacked tree, in slot: for storage that belongs to the
    engine."""
    tree_map(lambda rows, leaf: rows[index].copy_(leaf), stacked, tree)


def numbers(values: Iterable[int], device: torch.device) -> Tensor:
    """int64, as `torch.tensor` in a fifth of the time: it reads the values one by one."""
    return to_device(np.fromiter(values, np.int64), device)


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """An index array as a tensor on the device; a copy to a GPU does not block."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
