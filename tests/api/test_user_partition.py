"""A user's own partition: index lists that are checked, kept for every seed, and run as any
partition."""

from __future__ import annotations

from typing import Any

import torch

import fedml_noniid as nd

DATA = nd.load("digits")
DEALT = nd.partition(DATA, "dirichlet", clients=4, alpha=0.5, seed=3)
LAST = len(DATA.dataset.train_y) - 1
QUIET: dict[str, Any] = {"rounds": 2, "progress": False}


def test_given_lists_run_as_the_partition_that_they_are() -> None:
    """In any order, as any sequence; each seed has the same."""
    lists = [part[::-1] for part in DEALT.indices.clients]
    own = nd.partition(DATA, indices=lists)
    assert (own.table == DEALT.table).all(axis=None)
    found = nd.run("scaffold", own, seeds=[3, 4], **QUIET)
    assert found.sha256[3] == nd.run("scaffold", DEALT, seeds=[3], **QUIET).sha256[3]
    assert found.clients.groupby("seed")["samples"].apply(list)[4] == [len(part) for part in lists]
    again = nd.partition(DATA, indices=[torch.from_numpy(part.copy()) for part in lists])
    assert again.settings == own.settings  # by the checksum
    assert own.settings["partition"] in repr(own)
    assert nd.partition(DATA, indices=lists[:3]).settings["partition"] != own.settings["partition"]


def test_held_out_samples_are_those_of_no_client() -> None:
    own = nd.partition(DATA, indices=[range(100), range(300, 500)], validation=0.5, public=20)
    parts = *own.indices.clients, own.indices.validation, own.indices.public
    held, free = [set(part.tolist()) for part in parts], LAST + 1 - 300
    assert held[:2] == [set(range(100)), set(range(300, 500))]
    assert [*map(len, held)] == [100, 200, round(0.5 * free), 20]
    assert len(set().union(*held)) == sum(map(len, held))
    assert own.statistics["samples_left_out"] == free - len(held[2]) - 20
