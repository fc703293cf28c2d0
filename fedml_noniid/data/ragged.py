"""Lists of different lengths in one array: the positions of a million clients are two arrays, and
no object of each client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import numpy as np

from fedml_noniid.data.types import Ints


@dataclass(frozen=True, eq=False)
class Ragged(Sequence[Ints]):
    """N lists, one behind the other. Item k is a view of its part of `flat`."""

    flat: Ints  # [n]
    offsets: Ints  # [N + 1], from 0 to n: list k is flat[offsets[k] : offsets[k + 1]]

    @staticmethod
    def from_lists(lists: Sequence[Ints]) -> Ragged:
        """The same lists in one array. Ragged lists are returned as they are."""
        if isinstance(lists, Ragged):
            return lists
        offsets = np.zeros(len(lists) + 1, np.int64)
        np.cumsum([len(indices) for indices in lists], out=offsets[1:])
        return Ragged(np.concatenate([np.empty(0, np.int64), *lists]), offsets)

    @cached_property
    def sizes(self) -> Ints:
        """The lengths of the lists, [N]."""
        return np.diff(self.offsets)

    @property
    def holder(self) -> Ints:
        """The number of the list that an entry of `flat` is in, [n]."""
        return np.repeat(np.arange(len(self)), self.sizes)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Ints: ...
    @overload
    def __getitem__(self, index: slice) -> list[Ints]: ...
    def __getitem__(self, index: int | slice) -> Ints | list[Ints]:
        if isinstance(index, slice):
            return [self[k] for k in range(len(self))[index]]
        k = range(len(self))[index]  # also of negative numbers; IndexError beyond the end
        return self.flat[self.offsets[k] : self.offsets[k + 1]]


@dataclass(frozen=True, eq=False)
class ByClient(Mapping[int, Ints]):
    """The lists of the clients 0 to N - 1, by client id."""

    lists: Ragged

    def __getitem__(self, client: int) -> Ints:
        if not 0 <= client < len(self.lists):
            raise KeyError(client)
        return self.lists[client]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.lists)))

    def __len__(self) -> int:
        return len(self.lists)


def lists_of(clients: Mapping[int, Ints]) -> Ragged:
    """The lists of some clients, in the order of the mapping."""
    return (
        clients.lists if isinstance(clients, ByClient) else Ragged.from_lists([*clients.values()])
    )
