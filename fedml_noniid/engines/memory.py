"""Holds what clients remember from round to round: one row for each client.

Engines replace rows in place. Everything else in a simulation is pure.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fedml_noniid.core.errors import known
from fedml_noniid.core.trees import Tree, leaves, n_bytes, row, tree_map
from fedml_noniid.engines.client_state_file import (
    ClientStateFile,
    Places,
    memory_digests,
    memory_sha256,
)
from fedml_noniid.engines.plan import Plan
from fedml_noniid.engines.storage import ALIGNED, SharedStorage, numbers, replace_row

LOG = logging.getLogger(__name__)
FORMS = ("auto", "ram", "disk")


def memory_for(plan: Plan, first: Tree, places: Places) -> Memory:
    """In RAM or on disk, as the plan says, or by size. UserError for another form.

    `first`: a client's row before the first round. `places`: client -> its number.
    """
    known("clients_memory", plan.clients_memory, FORMS)
    n, size = len(places), n_bytes(first) * len(places)
    large = size > plan.memory_mb << 20 and n > plan.cohort
    if not size or plan.clients_memory == "ram" or not (large or plan.clients_memory == "disk"):
        return InMemory(first, places)
    LOG.info(
        "the memories of %d clients (%.1f GB) lie on disk; memory_mb is %d, clients_memory is %s",
        *(n, size / 1e9, plan.memory_mb, plan.clients_memory),
    )
    return ClientStateFile(first, places)


class InMemory:
    """Holds the rows of all clients in the memory of this process, on the device.

    A row is a tree by method, and then by the method's own names.
    """

    def __init__(self, first: Tree, places: Places) -> None:
        """`places`: client -> its row."""
        self.first, self._places = first, places
        self._path = Path()
        self._last: tuple[tuple[int, ...], Tensor] = ((), torch.empty(0))
        n = len(places)
        self._tree: Tree = tree_map(lambda leaf: leaf.expand(n, *leaf.shape).clone(), first)

    def row(self, client: int) -> Tree:
        """A client's row, leaves [...], perhaps as views of what `put_row` changes."""
        return row(self._tree, self._places[client])

    def rows(self, clients: Sequence[int]) -> Tree:
        """Copies of the rows of these clients, leaves [M, ...]."""
        return row(self._tree, self._index(clients))

    def put_row(self, client: int, row: Tree) -> None:
        """Replaces the row of a client, or the part of some methods in it."""
        replace_row({name: self._tree[name] for name in row}, self._places[client], row)

    def put(self, clients: Sequence[int], rows: Tree) -> None:
        """Replaces the rows of these clients, or the parts of some methods in them."""
        # Rows of different clients: no two writes meet.
        index, stored = self._index(clients), {name: self._tree[name] for name in rows}
        tree_map(lambda leaf, new: leaf.index_copy_(0, index, new), stored, rows)

    def whole(self, *names: str) -> Tree:
        """The rows of all clients in their order, leaves [N, ...]: of these methods, or of all."""
        return {name: tree for name, tree in self._tree.items() if not names or name in names}

    def restore(self, whole: Tree) -> None:
        """Replaces everything by what `whole` returned."""
        self._tree = whole

    def share(self) -> None:
        """Moves to memory that this process shares with those that it forks from here on."""
        n_leaves = len(list(leaves(self._tree)))
        storage = SharedStorage(n_bytes(self._tree) + ALIGNED * n_leaves)
        self._tree = storage.get(storage.put(self._tree))

    def keep_in(self, path: Path, fresh: bool) -> None:
        """Names the file for rows on disk. `fresh`: what is in it is of no use. Raises
        UserError."""
        self._path = path

    def state(self) -> Tree:
        """The trees of a checkpoint: "memory", or the "on_disk" of rows that are on the disk."""
        return {"memory": self._tree}

    def committed(self) -> None:
        """The checkpoint with the last state is on the disk."""

    def resume(self, on_disk: Tree) -> None:
        """Goes on with the rows in the file. Raises UserError."""
        file = ClientStateFile(self.first, self._places)
        file.keep_in(self._path, fresh=False)
        file.resume(on_disk)
        self._tree = file.whole()

    def sha256(self) -> str:
        """SHA-256 of the rows of all clients, hexadecimal; the same in every form."""
        digests = memory_digests(self._tree, len(self._places))
        return memory_sha256(self.first, digests.tobytes())

    def _index(self, clients: Sequence[int]) -> torch.Tensor:
        """Their places; for the clients of the last call without another copy to the device."""
        if self._last[0] != tuple(clients):
            device = next(leaves(self._tree), torch.empty(0)).device
            index = numbers(map(self._places.__getitem__, clients), device)
            self._last = tuple(clients), index
        return self._last[1]


Memory = InMemory | ClientStateFile
