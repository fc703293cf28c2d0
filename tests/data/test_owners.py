"""The names of owners: from the reader through the data set's file to the clients."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import fedml_noniid as nd
from fedml_noniid.data.dataset import Dataset, Raw
from fedml_noniid.data.owners import client_names, order_of

OWNERS = [0, 1, 1, 2]


def data_of(names: tuple[str, ...] = ("Berlin", "Koeln", "Ulm")) -> Dataset:
    """Four samples of three owners."""
    x, y, owner = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]), torch.tensor(OWNERS)
    return Dataset.from_raw(
        "made", Raw(x, y, x, y, ("a", "b"), 1.0, owner, owner, owner_names=names)
    )


@pytest.mark.parametrize(
    ("clients", "names"),
    [
        ([[3], [0], [1, 2]], ("Ulm", "Berlin", "Koeln")),
        ([[2], [0]], ("Koeln", "Berlin")),
        ([[0, 3], [1, 2]], ()),  # two owners in a client
        ([[1], [2]], ()),  # an owner in two clients
        ([[0], []], ()),
    ],
)
def test_a_client_has_the_name_of_its_only_owner(
    clients: list[list[int]], names: tuple[str, ...]
) -> None:
    lists = [np.array(one, np.int64) for one in clients]
    assert client_names(data_of(), lists) == names
    assert client_names(data_of(()), lists) == ()


def test_numbers_in_names_are_ordered_as_numbers() -> None:
    names = ["site 10", "a", "site 9", "2", "10"]
    assert [names[k] for k in order_of(names)] == ["2", "10", "a", "site 9", "site 10"]


@pytest.mark.parametrize("names", [("Ulm", "Bonn"), (12, 3)], ids=["text", "numbers"])
def test_readers_and_splits_name_owners(names: tuple[object, ...]) -> None:
    x, y, owner = np.arange(40.0).reshape(20, 2), np.arange(20) % 2, np.arange(20) // 10
    data = nd.from_arrays(x, y, owner=np.array(names)[owner])
    assert data.dataset.owner_names == tuple(map(str, sorted(names)))  # type: ignore[type-var]  # all of one kind
    wanted = ["3", "12"] if 3 in names else ["Bonn", "Ulm"]
    for seed in range(3):
        split = nd.partition(data, "natural", clients=2, seed=seed)
        assert split.table.index.tolist() == wanted and split.table.index.name == "owner"
        assert [label.get_text() for label in split.plot().get_yticklabels()] == wanted
        sums = {
            name: data.dataset.train_x[part].sum()
            for name, part in zip(
                client_names(data.dataset, split.indices.clients),
                split.indices.clients,
                strict=True,
            )
        }
        assert sums[str(names[0])] < sums[str(names[1])]
    assert nd.partition(data, "iid", clients=2).table.index.name == "client"
