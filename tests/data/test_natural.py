"""Partitions by writer or user, and the test set split as the training set is."""

import re
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedml_noniid.core.errors import UserError
from fedml_noniid.data import partitions
from fedml_noniid.data.client_tests import in_proportion, of_owners
from fedml_noniid.data.partitions import BY_OWNER, partition
from fedml_noniid.data.ragged import Ragged
from fedml_noniid.data.statistics import class_counts
from fedml_noniid.data.streams import stream
from tests.data.test_partitions import everything

# Users 7, 3, 900 and 5 with 4, 1, 3 and 2 samples.
OWNERS = np.array([7, 3, 900, 7, 5, 7, 900, 900, 5, 7])


@st.composite
def owned(draw):
    """Whose each sample is (the numbers have gaps), a subset of the samples, a number of clients
    that fits, a seed."""
    sizes = draw(st.lists(st.integers(1, 30), min_size=4, max_size=20))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    owners = rng.permutation(np.repeat(rng.permutation(1000)[: len(sizes)], sizes))
    indices = rng.permutation(len(owners))[: draw(st.integers(len(owners) // 2 + 1, len(owners)))]
    return (
        owners,
        indices,
        draw(st.integers(1, len(np.unique(owners[indices])))),
        draw(st.integers(0, 1000)),
    )


def split(name, owners, indices, n_clients, seed, **params):
    return partition(name, np.zeros(len(owners), int), indices, n_clients, seed, owners, **params)


def samples_of(owners, indices, users):
    return sorted(int(i) for i in indices if owners[i] in users)


def same(a, b):
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@settings(deadline=None, max_examples=40)
@given(owned(), st.data())
def test_users_and_groups_of_users(population, data):
    owners, indices, n_clients, seed = population
    users = set(owners[indices])
    drawn = data.draw(st.none() | st.integers(n_clients, len(users)))
    for name, options, total in (
        ("natural", {}, n_clients),
        ("natural_grouped", {"users": drawn}, drawn or len(users)),
    ):
        clients = split(name, owners, indices, n_clients, seed, **options)
        groups = [set(owners[client]) for client in clients]
        assert set.union(*groups) <= users
        assert sum(map(len, groups)) == len(set.union(*groups)) == total
        assert max(map(len, groups)) - min(map(len, groups)) <= 1
        wanted = [samples_of(owners, indices, group) for group in groups]
        assert [client.tolist() for client in clients] == wanted
        assert same(clients, split(name, owners, indices[::-1], n_clients, seed, **options))


USERS = "users with training samples"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *[
            (name, {"clients": n}, f"clients = {n!r} is refused; allowed: 1 to 4 (4 {USERS})")
            for name in BY_OWNER
            for n in (0, -3, 5, 2.0, float("nan"), "2", None, True)
        ],
        *[
            (
                "natural_grouped",
                {"users": n},
                f"users = {n!r} is refused; allowed: 2 to 4 (2 clients",
            )
            for n in (1, 5)
        ],
        (
            "natural",
            {"indices": [], "clients": 1},
            "clients = 1 is refused; allowed: none (0 users",
        ),
        # Without samples 4 and 8 user 5 has none, and is nobody.
        (
            "natural",
            {"indices": [0, 1, 2, 3, 5, 6, 7, 9], "clients": 4},
            "clients = 4 is refused; allowed: 1 to 3 (3 users with",
        ),
    ],
    ids=str,
)
def test_refused(name, options, message):
    """With one line, before anything is drawn."""
    options = {"indices": everything(OWNERS), "clients": 2} | options
    indices, clients = options.pop("indices"), options.pop("clients")
    with (
        patch.object(partitions, "stream", lambda *_: None),
        pytest.raises(UserError, match=re.escape(message)) as caught,
    ):
        split(name, OWNERS, indices, clients, 0, **options)
    assert "\n" not in str(caught.value)


# The test set


@st.composite
def counted(draw):
    """Training samples by client and class, labels of a test set, a seed."""
    n_clients, n_classes = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    counts = rng.integers(0, 50, (n_clients, n_classes)) * (
        rng.random((n_clients, n_classes)) < 0.6
    )
    labels = rng.permutation(np.repeat(np.arange(n_classes), rng.integers(0, 40, n_classes)))
    return counts, labels, draw(st.integers(0, 1000))


@settings(deadline=None, max_examples=40)
@given(counted())
def test_alike(population):
    counts, labels, seed = population
    parts = in_proportion(counts, labels, stream(seed, "test"))
    assert len(parts) == len(counts)
    assert all((np.diff(part) > 0).all() for part in parts)
    held = counts.sum(0) > 0
    assert (
        sorted(np.concatenate(parts)) == np.flatnonzero(held[labels]).tolist()
    )  # each once, what nobody holds never
    got = class_counts(labels, parts, counts.shape[1])
    exact = counts / np.maximum(counts.sum(0), 1) * np.bincount(labels, minlength=counts.shape[1])
    assert (np.abs(got - exact) < 1).all()
    assert (got[counts == 0] == 0).all()
    assert same(parts, in_proportion(counts, labels, stream(seed, "test")))


def test_clients_are_tested_on_their_own_users():
    test_owners = np.array([900, 5, 3, 900, 11, 7])  # 11 has no training sample, 5 is in no client
    clients = [np.array([0, 1, 3]), np.array([2, 6]), np.empty(0, np.int64)]
    for owners, wanted in ((test_owners, [[2, 5], [0, 3], []]), (test_owners[:0], [[], [], []])):
        parts = of_owners(Ragged.from_lists(clients), OWNERS, owners)
        assert parts is not None and [part.tolist() for part in parts] == wanted
    apart = Ragged.from_lists([np.array([0]), np.array([3])])  # both are user 7's
    assert of_owners(apart, OWNERS, test_owners) is None
