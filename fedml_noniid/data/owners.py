"""Clients by the names of their owners, such as hospitals.

The number of an owner's client may differ between seeds. The name stays.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedml_noniid.data.ragged import Ragged
from fedml_noniid.data.types import Ints

if TYPE_CHECKING:  # it imports torch
    from fedml_noniid.data.dataset import Dataset


MAX_NAMED = 1000  # clients; people read no more names, and each costs Python


def client_names(data: Dataset, clients: Sequence[Ints]) -> tuple[str, ...]:
    """The name of each client's owner, [N].

    Empty unless the data set names the owners, each client has the samples of one owner, and no
    owner is in two clients; also for more than MAX_NAMED clients.
    """
    lists = Ragged.from_lists(clients)
    is_named = bool(data.owner_names) and len(lists) <= MAX_NAMED
    if data.train_owner is None or not is_named or not lists.sizes.all():
        return ()
    owners = data.train_owner.numpy()[lists.flat]
    of_client = owners[lists.offsets[:-1]]
    if len(np.unique(of_client)) < len(lists) or (owners != of_client[lists.holder]).any():
        return ()
    return tuple(data.owner_names[number] for number in of_client.tolist())


def order_of(names: Sequence[str]) -> list[int]:
    """The numbers of the clients in the order of their names: `site 2` before `site 10`."""
    parts = [re.split(r"(\d+)", name) for name in names]
    keys = [[int(part) if i % 2 else part for i, part in enumerate(split)] for split in parts]
    return sorted(range(len(names)), key=keys.__getitem__)
