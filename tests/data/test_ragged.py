"""Lists in one array; partitions by owner in array code, however many owners there are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.data.dataset import Dataset, Raw
from fedml_noniid.data.ragged import Ragged
from fedml_noniid.pipelines.experiment.config import DataSettings, Scenario
from fedml_noniid.pipelines.experiment.partitioning import partition_of
from fedml_noniid.pipelines.stages.partition import clients_csv
from tests.work import calls, peak_bytes

LISTS = [np.array([4, 0]), np.empty(0, np.int64), np.array([7, 2, 1])]
PER_CLIENT = 3  # samples


def test_lists_are_views_of_one_array() -> None:
    ragged = Ragged.from_lists(LISTS)
    assert ragged.flat.tolist() == [4, 0, 7, 2, 1] and ragged.offsets.tolist() == [0, 2, 2, 5]
    assert ragged.sizes.tolist() == [2, 0, 3] and ragged.holder.tolist() == [0, 0, 2, 2, 2]
    assert [one.tolist() for one in ragged] == [one.tolist() for one in LISTS]
    assert ragged[-1].tolist() == [7, 2, 1] and np.shares_memory(ragged[2], ragged.flat)
    assert [one.tolist() for one in ragged[1:]] == [[], [7, 2, 1]]
    assert Ragged.from_lists(ragged) is ragged and len(Ragged.from_lists([])) == 0
    with pytest.raises(IndexError):
        ragged[3]


def data_of(n_owners: int) -> Dataset:
    """Each owner has PER_CLIENT training samples and a test sample; owners in a random order."""
    rng = np.random.default_rng(0)

    def owners(each: int) -> torch.Tensor:
        return torch.from_numpy(rng.permutation(np.repeat(np.arange(n_owners), each)))

    def labels(n: int) -> torch.Tensor:
        return torch.from_numpy(rng.integers(0, 3, n))

    train, test = owners(PER_CLIENT), owners(1)
    raw = Raw(
        torch.from_numpy(rng.normal(size=(len(train), 2)).astype(np.float32)),
        labels(len(train)),
        torch.zeros(len(test), 2),
        labels(len(test)),
        ("a", "b", "c"),
        *(1.0, train, test),
    )
    return Dataset.from_raw("made", raw)


def test_a_partition_by_owner_is_made_in_array_code() -> None:
    """Twice the owners: as many calls, and memory for numbers only. A list of a client, an
    array of its own and a row of text would take hundreds of bytes each."""

    def made(n_owners: int) -> Any:
        data, held_out = data_of(n_owners), DataSettings(name="arrays", validation=0, public=0)
        options = {"partition": "natural_grouped", "drift": {"at": 2, "swap": [["a", "b"]]}}
        scenario = Scenario(clients=n_owners, participation=0.001, **options)

        def partition() -> None:
            found = partition_of(data, held_out, scenario, "s", 0)
            assert len(found.indices.content) > 8 * PER_CLIENT * n_owners
            assert len(clients_csv(found, data.strata.names).splitlines()) == n_owners + 1

        return partition

    few, many = 3_500, 7_000
    made(few)()  # what is imported and cached on the first use
    before = calls(made(few))
    assert calls(made(many)) < before + (many - few) * 0.7  # not one of each client
    grown = peak_bytes(made(many)) - peak_bytes(made(few))
    assert grown < 1000 * (many - few)
