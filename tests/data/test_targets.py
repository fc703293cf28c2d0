"""Targets that are no classes: their checks, and the strata that partitions and splits go by."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

import fedml_noniid as nd
from fedml_noniid.core.errors import UserError
from fedml_noniid.data.partitions import BY_LABEL
from fedml_noniid.data.strata import NONE, strata

RNG = np.random.default_rng(0)
X = RNG.normal(size=(200, 3))
Y = np.column_stack([X[:, 0] ** 2, X[:, 1]])
LABELS = (X > [0.2, 1.0, 3.5]).astype(int)  # often, rarely, never


def frame() -> pd.DataFrame:
    columns = {"a": X[:, 0], "b": X[:, 1], "y": Y[:, 0], "z": Y[:, 1]}
    return pd.DataFrame(columns | {"hot": LABELS[:, 0], "who": np.arange(200) % 4})


def test_tenths_of_the_training_targets() -> None:
    y = np.arange(100.0)[:, None]
    found = strata(y, np.array([[-5.0], [9.0], [9.5], [99.0], [1e6]]), ["y"])
    assert np.bincount(found.train).tolist() == [10] * 10
    assert found.test.tolist() == [0, 0, 1, 9, 9]
    assert found.names[0] == "to 9" and found.names[-1] == "above 89" and len(found.names) == 10


def test_a_sample_counts_for_its_rarest_label() -> None:
    y = np.array([[1, 1, 0], [1, 0, 0], [1, 0, 1], [0, 0, 0], [1, 1, 1], [1, 1, 0]], float)
    found = strata(y, np.array([[0.0, 1.0, 0.0], [0, 0, 0]]), ["a", "b", "c"])
    assert [found.names[i] for i in found.train] == ["b", "a", "c", NONE, "c", "b"]
    assert [found.names[i] for i in found.test] == ["b", NONE]


OPTIONS: dict[str, dict[str, Any]] = {
    "dirichlet": {"alpha": 0.3},
    "quantity": {"beta": 0.5},
    "shards": {"classes_per_client": 3},
    "similarity": {"s": 0.2},
    "by_sizes": {"sizes": [50, 40, 30, 20]},
}


@pytest.mark.parametrize("y", [Y, LABELS], ids=["numbers", "labels"])
@pytest.mark.parametrize("name", sorted(BY_LABEL))
def test_every_partition_divides_them(name: str, y: Any) -> None:
    data = nd.from_arrays(X, y)
    present, options = np.unique(data.dataset.strata.train).tolist(), OPTIONS.get(name, {})
    clients = len(present) if name in ("mixed", "two_classes") else 4
    if name == "by_classes":
        names = [data.dataset.strata.names[one] for one in present]
        options = {"classes": [names[k::2] for k in (0, 1, 0, 1)]}
    split = nd.partition(data, name, clients=clients, validation=0.1, **options)
    held = np.concatenate(split.indices.clients)
    assert len(np.unique(held)) == len(held) and split.table.to_numpy().sum() == len(held)
    assert list(split.table.columns) == list(data.dataset.strata.names)
    assert split.table.columns.name == "stratum"
    if name == "dirichlet":
        split.plot(Figure().subplots())
    assert np.isfinite(split.statistics.drop("rotations", errors="ignore").astype(float)).all()
    tests = np.concatenate(split.indices.test_clients)
    assert len(np.unique(tests)) == len(tests)


@pytest.mark.parametrize(
    "skew", [{"label_noise": {"rate": 0.1}}, {"drift": {"at": 2, "swap": [[0, 1]]}}]
)
def test_what_swaps_classes_is_refused(skew: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="is refused: it swaps classes, and the targets are none"):
        nd.partition(nd.from_arrays(X, Y), "iid", clients=4, **skew)


def test_arrays_and_tables_have_the_same_targets() -> None:
    arrays = nd.from_arrays(X[:, :2], Y, classes=np.array(["y", "z"]))
    table = nd.from_frame(frame(), target=["y", "z"], drop=["hot", "who"])
    assert arrays.dataset.train_y.dtype is torch.float32 and arrays.classes == ("y", "z")
    for part in ("train_x", "train_y", "test_x", "test_y"):
        assert torch.equal(getattr(arrays.dataset, part), getattr(table.dataset, part))
    one = nd.from_frame(frame(), target="y", owner="who", drop=["hot", "z"])
    assert one.dataset.train_y.shape[1] == 1 and "1 targets, 4 owners" in repr(one)
    rows = np.concatenate([one.dataset.train_y.numpy(), one.dataset.test_y.numpy()])
    assert np.array_equal(np.sort(rows[:, 0]), np.sort(Y[:, 0].astype(np.float32)))
    labels = nd.from_arrays(X, LABELS)
    assert any("labels that no training sample has: y2" in note for note in labels.notes)
    assert any("has mean 500.0" in n or "mean 5" in n for n in nd.from_arrays(X, Y + 500).notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"label": "hot", "target": "y"},
            "label = 'hot' is refused with target = 'y'; allowed: one",
        ),
        ({}, "label is missing; allowed: the column of the class, or `target`"),
        ({"target": "why"}, "target: column 'why' is unknown"),
        ({"target": ["y", "y"]}, "target = 'y' is refused; allowed: each column once"),
        (
            {"target": "y", "features": ["y"]},
            "features = 'y' is refused; allowed: columns that are not in `target`",
        ),
        ({"target": "text"}, "column 'text' is 'p' in row 1; allowed: numbers"),
        ({"target": "hole"}, "column 'hole' has no value in row 3"),
        ({"target": "same"}, "column 'same' is always [1.5]; there is nothing to learn"),
        ({"target": ["y", "same"]}, "'y', 'same' is always [1.5] (same); there is nothing"),
    ],
)
def test_columns_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    hole = Y[:, 0].copy()
    hole[2] = np.nan
    table = frame().assign(text="p", hole=hole, same=1.5)
    drop = [name for name in ("text", "hole", "same") if name not in np.ravel(change.get("target"))]
    with pytest.raises(UserError) as caught:
        nd.from_frame(table, drop=drop, **change)
    assert message in str(caught.value)
