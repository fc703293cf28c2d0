"""The papers' scenarios beside IID, Dirichlet and shards of random size; what holds for all is in
test_partitions."""

import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import maximum_flow

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.partitions import assigning, label_and_quantity, partition
from fedml_noniid.data.partitions.quantity import exact_sizes
from fedml_noniid.data.statistics import class_counts
from tests.data.test_partitions import DIGITS, check, everything, populations, refuse

# MNIST's training set.
MNIST = np.repeat(np.arange(10), [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949])
LAWS = [
    {"sizes": "power_law"},
    {"sizes": "power_law", "exponent": 0.5},
    {"sizes": "lognormal"},
]


def sizes_of(clients):
    return np.array([len(client) for client in clients])


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ([100, 50, 25], [100, 50, 25]),
        ([1000, 293, 1], [1000, 293, 1]),  # all of them
        (
            [0.5, 0.25, 0.25],
            [647, 324, 323],
        ),  # of 1294: 647, 323.5 and 323.5; the first of equal remainders
        (
            [0.7, 0.2, 0.1],
            [906, 259, 129],
        ),  # 905.8, 258.8 and 129.4; in floating point the sum is not 1
        (
            [0.1, 0.1, 0.05],
            [130, 129, 65],
        ),  # 129.4, 129.4 and 64.7; together 323.5, rounded to the even 324
        ([1.0], [1294]),
        ([1], [1]),
    ],
)
def test_sizes_that_are_given(sizes, wanted):
    clients = partition("by_sizes", DIGITS, everything(DIGITS), len(sizes), 0, sizes=sizes)
    assert sizes_of(clients).tolist() == wanted
    assert len(np.unique(np.concatenate(clients))) == sum(wanted)


def test_sizes_by_hand():
    assert exact_sizes(np.ones(3), 8, 1).tolist() == [3, 3, 2]
    # 4 : 2 : 1 : 1 of 16 is 8, 4, 2, 2; with at least 3 the last two take 6, and 10 is cut 4 : 2,
    # 6.67 and 3.33.
    assert exact_sizes(np.array([4.0, 2, 1, 1]), 16, 1).tolist() == [8, 4, 2, 2]
    assert exact_sizes(np.array([4.0, 2, 1, 1]), 16, 3).tolist() == [7, 3, 3, 3]
    # At least 5 lifts the second too.
    assert exact_sizes(np.array([4.0, 2, 1, 1]), 21, 5).tolist() == [6, 5, 5, 5]


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=30), st.integers(1, 9), st.integers(0, 500)
)
def test_sizes_add_up(weights, min_size, more):
    total = min_size * len(weights) + more
    sizes = exact_sizes(np.array(weights), total, min_size)
    assert sizes.sum() == total
    assert sizes.min() >= min_size
    assert (np.diff(sizes[np.argsort(weights, kind="stable")]) >= -1).all()


@settings(deadline=None, max_examples=60)
@given(
    st.integers(2, 8),
    st.integers(1, 4),
    st.sampled_from([{}, *LAWS]),
    st.floats(0.3, 1),
    st.integers(0, 1000),
)
@example(8, 1, {"sizes": "lognormal"}, 1.0, 8)  # a class runs out
def test_two_classes(n_classes, times, law, part, seed):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.repeat(np.arange(n_classes), rng.integers(60, 90, n_classes)))
    n_clients = n_classes * times
    total = int(part * len(labels))
    assume(total >= 10 * n_clients)
    try:
        clients = partition(
            "two_classes", labels, everything(labels), n_clients, seed, total=total, **law
        )
    except UserError as error:
        # A class that runs out: not for equal sizes, which fit here.
        if law and re.search("total = |lower total", str(error)):
            return
        raise
    assigned = np.concatenate(clients)
    assert len(np.unique(assigned)) == len(assigned) == total
    check(assigned, clients, n_clients, least=10)
    counts = class_counts(labels, clients, n_classes)
    assert ((counts > 0).sum(1) == 2).all()
    assert ((counts > 0).sum(0) == 2 * times).all()
    if not law:
        assert np.ptp(counts.sum(1)) <= 1
    if law == LAWS[0]:
        assert (
            counts.sum(1).tolist()
            == exact_sizes(np.arange(1, n_clients + 1) ** -1.2, total, 10).tolist()
        )


def test_two_classes_of_mnist():
    """FedNNNN's K = 100: 20 clients per class, 600 samples each, all 60000 dealt; halves where the
    classes allow it."""
    clients = partition("two_classes", MNIST, everything(MNIST), 100, 0)
    check(everything(MNIST), clients, 100)
    counts = class_counts(MNIST, clients, 10)
    assert (counts.sum(1) == 600).all()
    assert ((counts > 0).sum(0) == 20).all()
    assert counts[counts > 0].min() > 200
    counts = class_counts(
        MNIST, partition("two_classes", MNIST, everything(MNIST), 100, 0, total=50_000), 10
    )
    assert (counts[counts > 0] == 250).all()


def test_two_classes_by_a_power_law_want_fewer_samples_than_mnist_has():
    refuse(
        "total = 60000 is refused; allowed: 1000 to 46729;",
        "two_classes",
        MNIST,
        clients=100,
        sizes="power_law",
    )


@settings(deadline=None, max_examples=200)
@given(st.integers(2, 6), st.integers(1, 3), st.floats(0.8, 1.5), st.integers(0, 10_000))
def test_a_split_is_found_if_there_is_one(n_classes, times, plenty, seed):
    """Against a maximum flow from clients to classes, each having one sample of both of its classes
    already."""
    rng = np.random.default_rng(seed)
    n_clients = n_classes * times
    sizes = rng.integers(2, 60, n_clients)
    held = assigning.assign_classes(np.full(n_classes, 2 * times), n_clients, 2, rng)
    supply = np.maximum(
        2 * times, rng.dirichlet(np.full(n_classes, 5)) * sizes.sum() * plenty
    ).astype(np.int64)
    counts = label_and_quantity._split(sizes, held, supply)

    source, sink = n_clients + n_classes, n_clients + n_classes + 1
    graph = np.zeros((sink + 1, sink + 1), np.int32)
    graph[source, :n_clients] = sizes - 2
    graph[:n_clients, n_clients:source] = held.T * 1000
    graph[n_clients:source, sink] = supply - 2 * times
    possible = maximum_flow(csr_array(graph), source, sink).flow_value == (sizes - 2).sum()
    assert (counts is not None) == possible
    if counts is not None:
        assert (counts.sum(0) == sizes).all()
        assert (counts.sum(1) <= supply).all()
        assert ((counts > 0) == held).all()


def test_two_classes_give_up(monkeypatch):
    """One client wants nearly all samples, and only a draw can tell."""
    monkeypatch.setattr(label_and_quantity, "relative_sizes", lambda *_: np.eye(10)[0] + 1e-9)
    with pytest.raises(
        UserError, match=r"100 pairings of classes gave no partition of total=1294 .* lower total"
    ):
        partition("two_classes", DIGITS, everything(DIGITS), 10, 0, sizes="lognormal")


@settings(deadline=None, max_examples=60)
@given(populations(), st.sampled_from([0, 0.1, 0.5, 0.99, 1]))
def test_similarity(population, s):
    labels, indices, n_clients, seed = population
    clients = partition("similarity", labels, indices, n_clients, seed, s=s)
    assigned = np.concatenate(clients)
    alike = int(s * len(indices))
    assert set(assigned) <= set(indices)
    assert len(indices) - len(assigned) == alike % n_clients + (len(indices) - alike) % n_clients
    check(assigned, clients, n_clients)
    assert np.ptp(sizes_of(clients)) == 0
    if s == 0:
        assert all(labels[a].max() <= labels[b].min() for a, b in pairwise(clients))


def test_shards_equal_of_classes_that_divide():
    """McMahan's case in small: 10 classes of 60, 20 clients, 40 shards of 15 samples of one class
    each."""
    labels = np.random.default_rng(0).permutation(np.arange(600) % 10)
    counts = class_counts(labels, partition("shards_equal", labels, everything(labels), 20, 0), 10)
    assert (counts.sum(1) == 30).all()
    assert set(counts.flat) <= {0, 15, 30}
    assert set((counts > 0).sum(1)) == {1, 2}


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(20, 90), min_size=2, max_size=8),
    st.sampled_from([0.5, 5.0]),
    st.integers(0, 1000),
)
def test_mixed(sizes, beta, seed):
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    clients = partition(
        "mixed", labels, everything(labels), len(sizes), seed, beta=beta, min_size=3
    )
    check(everything(labels), clients, len(sizes), least=3)
    counts = class_counts(labels, clients, len(sizes))
    assert ((counts > 0).sum(1) <= 2).all()
    assert ((counts > 0).sum(0) <= 2).all()
