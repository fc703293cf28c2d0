"""A user's own partition: index lists that are checked, kept for every seed, and run as any
partition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedml_noniid as nd

DATA = nd.load("digits")
DEALT = nd.partition(DATA, "dirichlet", clients=4, alpha=0.5, seed=3)
LAST = len(DATA.dataset.train_y) - 1
QUIET: dict[str, Any] = {"rounds": 2, "progress": False}


def test_given_lists_run_as_the_partition_that_they_are() -> None:
    lists = [part[::-1] for part in DEALT.indices.clients]  # in any order
    own = nd.partition(DATA, indices=lists)
    assert (own.table == DEALT.table).all(axis=None)
    wanted = nd.run("scaffold", DEALT, seeds=[3], **QUIET)
    found = nd.run("scaffold", own, seeds=[3, 4], **QUIET)
    assert found.sha256[3] == wanted.sha256[3]
    # Another seed deals the same.
    assert found.clients.groupby("seed")["samples"].apply(list)[4] == [len(part) for part in lists]
    again = nd.partition(DATA, indices=[torch.from_numpy(part.copy()) for part in lists])
    assert again.settings == own.settings  # by the checksum
    assert own.settings["partition"] in repr(own)
    assert nd.partition(DATA, indices=lists[:3]).settings["partition"] != own.settings["partition"]


def test_given_lists_of_data_with_owners() -> None:
    """Clients of lists are tested as those of other partitions: here, alike."""
    rng = np.random.default_rng(0)
    data = nd.from_arrays(rng.normal(size=(200, 4)), np.arange(200) % 2, owner=np.arange(200) % 10)
    own = nd.partition(data, indices=[range(50), range(50, 100)])
    assert [len(part) for part in own.indices.test_clients] == [20, 20]


def test_held_out_samples_are_those_of_no_client() -> None:
    own = nd.partition(DATA, indices=[range(100), range(300, 500)], validation=0.5, public=20)
    held = [
        set(part.tolist())
        for part in (*own.indices.clients, own.indices.validation, own.indices.public)
    ]
    assert held[:2] == [set(range(100)), set(range(300, 500))]
    free = LAST + 1 - 300
    assert [len(part) for part in held] == [100, 200, round(0.5 * free), 20]
    assert len(set().union(*held)) == sum(map(len, held))
    assert own.statistics["samples_left_out"] == free - len(held[2]) - 20
    assert nd.run("fnr", own, seeds=[1], **QUIET).seeds == (1,)


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ([], r"indices = \[\] is refused; allowed: a list of arrays, one per client"),
        ("ab", "indices = 'ab' is refused"),
        (5, "indices = 5 is refused"),
        ({0: [1]}, "indices = .* is refused"),
        ([[0, 1], []], rf"indices\[1\] = \[\] is refused; allowed: .* from 0 to {LAST}"),
        ([[0.5]], r"indices\[0\] = \[0.5\] is refused"),
        ([[True, False]], r"indices\[0\] = .* is refused"),
        ([0, 1], r"indices\[0\] = 0 is refused"),
        ([[0], [LAST + 1]], rf"indices\[1\] = \[{LAST + 1}\] is refused"),
        ([[-1]], r"indices\[0\] = \[-1\] is refused"),
        ([[1, 2], [3, 2]], "indices: 2 is there 2 times; allowed: once"),
        ([[1, 3, 3]], "indices: 3 is there 2 times"),
        ([np.ma.array([1, 3], mask=[0, 1])], r"indices\[0\]\[1\] is masked"),
    ],
)
def test_lists_that_are_no_partition(indices: Any, words: str) -> None:
    with pytest.raises(nd.UserError, match=f"^partition: {words}"):
        nd.partition(DATA, indices=indices)


def test_lists_stand_alone() -> None:
    for given, words in (
        ({"partition": "iid"}, "indices are refused beside partition and clients"),
        ({"clients": 2}, "indices are refused beside partition and clients"),
        ({"alpha": 0.1}, "alpha is unknown"),
    ):
        with pytest.raises(nd.UserError, match=f"^partition: {words}"):
            nd.partition(DATA, indices=[[0], [1]], **given)
    with pytest.raises(
        nd.UserError,
        match=r"^partition: public = 10 is refused; allowed: 0, as the clients have all",
    ):
        nd.partition(DATA, indices=[np.arange(LAST + 1)], public=10)
    with pytest.raises(nd.UserError, match=r"^run: .*partition 'given-12' is unknown"):
        nd.run("fedavg", DATA, partition="given-12", clients=3, **QUIET)
    with pytest.raises(
        nd.UserError, match=r"^partition: client is no argument .did you mean 'clients'"
    ):
        nd.partition(DATA, "iid", client=3)
