"""Holds what clients remember from round to round: one row for each client.

Engines replace rows in place. Everything else in a simulation is pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from fedml_noniid.plugins.core.trees import Tree, leaves, n_bytes, row, tree_map
from fedml_noniid.plugins.engines.storage import ALIGNED, SharedStorage, numbers, replace_row


class Memory(Protocol):
    """The rows of all clients; a row is a tree by method, and then by the method's own names."""

    first: Tree  # the row of a client that was never asked, leaves [...]

    def row(self, client: int) -> Tree:
        """A copy of a client's row, leaves [...]."""
        ...

    def rows(self, clients: Sequence[int]) -> Tree:
        """Copies of the rows of these clients, leaves [M, ...]."""
        ...

    def put_row(self, client: int, row: Tree) -> None:
        """Replaces the row of a client, or the part of some methods in it."""
        ...

    def put(self, clients: Sequence[int], rows: Tree) -> None:
        """Replaces the rows of these clients, or the parts of some methods in them."""
        ...

    def whole(self, *names: str) -> Tree:
        """The rows of all clients in their order, leaves [N, ...]: of these methods, or of all."""
        ...

    def restore(self, whole: Tree) -> None:
        """Replaces everything by what `whole` returned."""
        ...

    def share(self) -> None:
        """Moves to memory that this process shares with those that it forks from here on."""
        ...


class InMemory:
    """Holds the rows of all clients in the memory of this process, on the device."""

    def __init__(self, first: Tree, places: Mapping[int, int]) -> None:
        """`places`: client -> its row."""
        self.first, self._places = first, places
        n = len(places)
        self._tree: Tree = tree_map(lambda leaf: leaf.expand(n, *leaf.shape).clone(), first)

    def row(self, client: int) -> Tree:
        # A copy: what a component uploads may be its memory, which is replaced before the replies
        # are stacked.
        at = self._places[client]
        return tree_map(lambda leaf: leaf[at].clone(), self._tree)

    def rows(self, clients: Sequence[int]) -> Tree:
        return row(self._tree, self._index(clients))

    def put_row(self, client: int, row: Tree) -> None:
        replace_row({name: self._tree[name] for name in row}, self._places[client], row)

    def put(self, clients: Sequence[int], rows: Tree) -> None:
        # Rows of different clients: no two writes meet.
        index, stored = self._index(clients), {name: self._tree[name] for name in rows}
        tree_map(lambda leaf, new: leaf.index_copy_(0, index, new), stored, rows)

    def whole(self, *names: str) -> Tree:
        return {name: tree for name, tree in self._tree.items() if not names or name in names}

    def restore(self, whole: Tree) -> None:
        self._tree = whole

    def share(self) -> None:
        n_leaves = len(list(leaves(self._tree)))
        storage = SharedStorage(n_bytes(self._tree) + ALIGNED * n_leaves)
        self._tree = storage.get(storage.put(self._tree))

    def _index(self, clients: Sequence[int]) -> torch.Tensor:
        device = next(leaves(self._tree), torch.empty(0)).device
        return numbers(map(self._places.__getitem__, clients), device)
