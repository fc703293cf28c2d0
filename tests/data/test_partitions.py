import math
import re
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedml_noniid.core.errors import UserError
from fedml_noniid.data import partitions
from fedml_noniid.data.partitions import BY_OWNER, PARTITIONS, assigning, partition
from fedml_noniid.data.statistics import class_counts, entropy, gini, label_distance, summary
from fedml_noniid.data.streams import stream

# As digits after a validation split: 1294 samples of 10 classes.
DIGITS = np.random.default_rng(0).permutation(np.arange(1294) % 10)
# Those of users have tests of their own, in test_natural.
PARAMS = {name: {} for name in PARTITIONS if name not in BY_OWNER} | {
    "dirichlet": {"alpha": 0.3},
    "shards": {"classes_per_client": 2},
    "similarity": {"s": 0.1},
    "by_classes": {"classes": [[k, (k + 3) % 10] for k in range(10)]},
    "two_classes": {"sizes": "power_law", "total": 400},
    "by_sizes": {"sizes": [5, 10, 20, 40, 80, 160, 300, 3, 2, 1]},
}


def everything(labels):
    return np.arange(len(labels))


def check(indices, clients, n_clients, least=1):
    assert len(clients) == n_clients
    assert min(map(len, clients)) >= least
    assert all((np.diff(client) > 0).all() for client in clients)
    assert np.array_equal(np.sort(np.concatenate(clients)), np.sort(indices))


@st.composite
def populations(draw):
    """Labels of 2 to 6 classes in unequal amounts, a subset of their indices, and a number of
    clients."""
    sizes = draw(st.lists(st.integers(20, 90), min_size=2, max_size=6))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    labels = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    indices = rng.permutation(len(labels))[: draw(st.integers(len(labels) * 3 // 4, len(labels)))]
    return labels, indices, draw(st.integers(1, 6)), draw(st.integers(0, 1000))


@settings(deadline=None, max_examples=60)
@given(populations(), st.data())
def test_shards(population, data):
    labels, indices, n_clients, seed = population
    n_classes = len(np.unique(labels[indices]))
    s = data.draw(st.integers(-(-n_classes // n_clients), n_classes))
    clients = partition("shards", labels, indices, n_clients, seed, classes_per_client=s)
    check(indices, clients, n_clients)
    counts = class_counts(labels, clients, n_classes)
    assert ((counts > 0).sum(1) == s).all()
    holders = (counts > 0).sum(0)
    assert holders.max() - holders.min() <= 1
    equal_share = counts.sum(0) / holders
    assert (np.where(counts > 0, counts, np.inf) >= equal_share / 10).all()


@settings(deadline=None, max_examples=60)
@given(populations(), st.data())
def test_by_classes(population, data):
    labels, indices, n_clients, seed = population
    present, supply = np.unique(labels[indices], return_counts=True)
    one = st.lists(st.sampled_from(present.tolist()), min_size=1, unique=True)
    classes = data.draw(st.lists(one, min_size=n_clients, max_size=n_clients))
    clients = partition("by_classes", labels, indices, n_clients, seed, classes=classes)
    held = np.array([[c in mine for c in present] for mine in classes])
    assigned = np.sort(np.concatenate(clients))
    check(assigned, clients, n_clients)
    assert np.array_equal(
        assigned, np.sort(indices[np.isin(labels[indices], present[held.any(0)])])
    )
    counts = class_counts(labels, clients, present.max() + 1)[:, present]
    assert (counts[~held] == 0).all()
    share = (supply / np.maximum(held.sum(0), 1))[None].repeat(n_clients, 0)
    assert (np.abs(counts - share)[held] < 1).all()


def test_dirichlet_equals_niid_bench_in_distribution():
    """Against NIID-Bench's loop (partition_data, noniid-labeldir), attempt by attempt: the same
    mean skew."""

    def reference(rng, n_clients, alpha):
        sizes = np.zeros(n_clients)
        counts = []
        for c in range(10):
            p = rng.dirichlet(np.repeat(alpha, n_clients))
            p = p * (sizes < len(DIGITS) / n_clients)
            edges = (np.cumsum(p / p.sum()) * (c == DIGITS).sum()).astype(int)[:-1]
            counts.append(np.diff(edges, prepend=0, append=(c == DIGITS).sum()))
            sizes += counts[-1]
        return np.stack(counts, 1)

    def measures(counts):
        return [label_distance(counts).mean(), gini(counts.sum(1)), counts.sum(1).max() / 100]

    rng = stream(0, "test")
    ours = [
        class_counts(
            DIGITS,
            partition("dirichlet", DIGITS, everything(DIGITS), 8, seed, alpha=0.5, min_size=1),
            10,
        )
        for seed in range(80)
    ]
    theirs = [
        counts for counts in (reference(rng, 8, 0.5) for _ in range(80)) if counts.sum(1).min() >= 1
    ]
    a, b = (np.array([measures(counts) for counts in sample]) for sample in (ours, theirs))
    error = np.sqrt(a.var(0) / len(a) + b.var(0) / len(b))
    assert (np.abs(a.mean(0) - b.mean(0)) < 4 * error).all()


def test_statistics_by_hand():
    labels = np.array([0, 0, 1, 1, 2, 2, 2, 2])
    counts = class_counts(labels, [np.array([0, 2]), np.array([4, 5, 6, 7]), np.array([1, 3])], 3)
    assert counts.tolist() == [[1, 1, 0], [0, 0, 4], [1, 1, 0]]
    assert entropy(counts).tolist() == [1, 0, 1]
    # all samples: (1/4, 1/4, 1/2)
    assert label_distance(counts).tolist() == [0.5, 0.5, 0.5]
    # sizes 2, 2, 4: (-2*2 + 0*2 + 2*4) / (3 * 8)
    found = [gini(sizes) for sizes in (counts.sum(1), [0, 0, 0, 5], [5, 5])]
    assert found == pytest.approx([4 / 24, 3 / 4, 0])
    wanted = {"samples": 8, "size_max": 4, "entropy_mean": 2 / 3, "classes_per_client_mean": 5 / 3}
    assert {key: summary(counts)[key] for key in wanted} == pytest.approx(wanted)


# What every partition keeps

FITTING = [
    ("iid", {}),
    *[
        ("dirichlet", {"alpha": alpha, "min_size": least, "cap": cap})
        for alpha, least, cap in ((0.2, 1, "on"), (1, 3, "off"), (100.0, 2, True), (1, 2, False))
    ],
    *[("quantity", {"beta": beta, "min_size": least}) for beta, least in ((0.3, 1), (100.0, 4))],
    *[("iid_unbalanced", {"min_size": least}) for least in (1, 5)],
    ("iid_unbalanced", {"exponent": 0.5, "min_size": 2}),
    ("iid_unbalanced", {"sizes": "lognormal", "min_size": 3}),
    *[("shards_equal", {"shards_per_client": shards}) for shards in (1, 2, 4)],
]


@settings(deadline=None, max_examples=80)
@given(populations(), st.sampled_from(FITTING))
def test_all_samples_go_to_somebody(population, fitting):
    labels, indices, n_clients, seed = population
    name, params = fitting
    clients = partition(name, labels, indices, n_clients, seed, **params)
    check(indices, clients, n_clients, least=params.get("min_size", 1))
    if name == "iid":
        assert max(map(len, clients)) - min(map(len, clients)) <= 1
    if name == "shards_equal":
        shards = params["shards_per_client"]
        shortest = len(indices) // (n_clients * shards)
        assert min(map(len, clients)) >= shortest * shards
        assert max(map(len, clients)) <= (shortest + 1) * shards


@pytest.mark.parametrize("name", PARAMS)
def test_the_seed_decides_and_not_the_order_of_the_indices(name):
    indices = everything(DIGITS)[200:]
    first, again, other = (
        partition(name, DIGITS, order, 10, seed, **PARAMS[name])
        for order, seed in ((indices, 1), (indices[::-1], 1), (indices, 2))
    )
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("name", "params"),
    [
        (name, {key: value, "min_size": 100})
        for name, key in (("dirichlet", "alpha"), ("quantity", "beta"), ("mixed", "beta"))
        for value in (1e-300, 1e-4)
    ],
)
def test_what_is_next_to_impossible_ends_in_an_error(monkeypatch, name, params):
    monkeypatch.setattr(assigning, "MAX_ATTEMPTS", 2000)
    labels = np.repeat(np.arange(10), [60, 140] * 5)
    message = rf"{name}: 2000 attempts gave no partition .* raise (alpha|beta), lower min_size or"
    with pytest.raises(UserError, match=message):
        partition(name, labels, everything(labels), 10, 0, **params)


# What is refused

TWO, FEW = np.repeat([0, 1], [500, 7]), np.array([0, 0, 0, 1, 1])
WRONG_SIZES = "min_size = {!r} is refused; allowed: {} to 129 (1294 samples over 10 clients)"
# (partition, options beside those of PARAMS, the message; labels, clients)
REFUSED = [
    *[(name, {}, "clients = 1 is refused; allowed: none (0", DIGITS[:0], 1) for name in PARAMS],
    *[
        (
            name,
            {},
            f"clients = {clients!r} is refused; allowed: 1 to 1294 (1294 training",
            None,
            clients,
        )
        for name in PARAMS
        for clients in (0, -3, 1295, 2.0, math.nan, "10", None, True)
    ],
    *[
        (name, {"min_size": size}, WRONG_SIZES.format(size, 2 if name == "two_classes" else 1))
        for name in ("dirichlet", "quantity", "mixed", "iid_unbalanced")
        for size in (130,)
    ],
    ("dirichlet", {}, "min_size = 10 is refused; allowed: 1 to 6 ", None, 200),
    ("two_classes", {"total": 90}, "min_size = 10 is refused; allowed: 2 to 9 (90 samples over 10"),
    *[
        (
            "shards",
            {"classes_per_client": s},
            f"classes_per_client = {s!r} is refused; allowed: 1 to 10",
        )
        for s in (11,)
    ],
    ("shards", {}, "classes_per_client = 2 is refused; allowed: at least 4: 3 clients", None, 3),
    ("shards", {}, "class 1 has 3 samples; lower clients", np.repeat([0, 1], [99, 3]), 5),
    (
        *("shards", {"classes_per_client": 1}, "need 2 shards of each class"),
        np.array([0, 0, 0, 1, 2]),
        5,
    ),
    *[
        (
            "shards_equal",
            {"shards_per_client": s},
            f"shards_per_client = {s!r} is refused; allowed: 1 to 129",
        )
        for s in (130,)
    ],
    (
        *(
            "similarity",
            {"s": 0.5},
            "clients = 10 is refused; allowed: fewer: with s=0.5, 15 samples leave",
        ),
        np.arange(15) % 3,
        10,
    ),
    *[
        ("by_classes", {"classes": classes}, message, None, 2)
        for classes, message in (
            ([[0]], "classes = [[0]] is refused; allowed: a list of 2 lists"),
            (
                [[0], [10]],
                "classes[1] = [10] is refused; allowed: each class of the training set once: 0,",
            ),
            (
                [[4, 4], [0]],
                "classes[0] = [4, 4] is refused; allowed: each class of the training set once",
            ),
        )
    ],
    (
        "by_classes",
        {"classes": [[0, 1], [1], [1]]},
        "at most 2 clients with class 1, which",
        FEW,
        3,
    ),
    ("mixed", {}, "clients = 8 is refused; allowed: 10, one per class", None, 8),
    ("mixed", {}, "clients = 1 is refused; allowed: none: mixed needs 2", np.zeros(50, int), 1),
    *[
        (name, options, message)
        for name in ("iid_unbalanced", "two_classes")
        for options, message in (
            (
                {"sizes": "lognormal", "exponent": 2},
                "exponent = 2 is refused; allowed: none with sizes",
            ),
        )
    ],
    (
        "two_classes",
        {},
        "clients = 12 is refused; allowed: multiples of 5: 2 classes each",
        None,
        12,
    ),
    (
        "two_classes",
        {},
        "clients = 4 is refused; allowed: multiples of 3",
        np.repeat([0, 1, 2], 50),
        4,
    ),
    (
        "two_classes",
        {},
        "clients = 4 is refused; allowed: none: two_classes needs",
        np.zeros(50, int),
        4,
    ),
    (
        "two_classes",
        {"sizes": "balanced", "exponent": 1},
        "exponent = 1 is refused; allowed: none with",
    ),
    *[
        (
            "two_classes",
            {"total": n},
            f"total = {n!r} is refused; allowed: 20 to 1294 (1294 training",
        )
        for n in (19, 1295)
    ],
    (
        "two_classes",
        {"total": None},
        "20 clients need 20 samples of each class, but class 1 has 7",
        TWO,
        20,
    ),
    *[
        ("by_sizes", {"sizes": sizes}, message, None, 3)
        for sizes, message in (
            (
                [100, 50],
                "sizes = [100, 50] is refused; allowed: a list of 3 sizes, one per client, not 2",
            ),
            (
                [1000, 294, 1],
                "sizes = [1000, 294, 1] is refused; allowed: a sum of at most 1294",
            ),
            (
                [100.0, 5.0, 5.0],
                "sizes = [100.0, 5.0, 5.0] is refused; allowed: a sum of at most 1294",
            ),
            (
                [0.5, 1, 0.1],
                "sizes = [0.5, 1, 0.1] is refused; allowed: whole numbers for all clients, or",
            ),
            (
                [0.5, 0.4, 0.2],
                "or of fractions of at most 1, not 1.1",
            ),
            (
                [0.5, 0.0001, 0.2],
                "sizes[1] = 0.0001 is refused; allowed: a fraction that gives at least one",
            ),
        )
    ],
    (
        "dirichlett",
        {},
        "partition 'dirichlett' is unknown (did you mean 'dirichlet'?); allowed: iid,",
    ),
    ("iid", {"alpha": 1}, "alpha is unknown; allowed: none"),
    (7, {}, "partition 7 is unknown"),
]


def refuse(message, name="dirichlet", labels=DIGITS, clients=10, **params):
    """The value is refused with `message`, before anything is drawn."""
    with (
        patch.object(partitions, "stream", lambda *_: None),
        pytest.raises(UserError, match=re.escape(message)) as caught,
    ):
        partition(name, labels, everything(labels), clients, 0, **params)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_refused(case):
    name, params, message, *more = case
    labels, clients = more or (None, 10)
    params = PARAMS.get(name, {}) | params
    refuse(message, name, DIGITS if labels is None else labels, clients, **params)
