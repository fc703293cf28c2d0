"""Data sets of items: torch's, and a stand-in for those of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import fedml_noniid as nd

N = 20
X, Y = np.random.default_rng(0).random((N, 4), np.float32), np.arange(N) % 2
TOKENS, OWNERS = np.arange(3 * N).reshape(N, 3), [f"h{i % 4}" for i in range(N)]


class Items(Dataset[Any]):
    """As a user writes it: `item` makes each of the items."""

    def __init__(self, item: Callable[[int], Any], n: int = N) -> None:
        self.item, self.n = item, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return self.item(i)


class Table(Items):
    """As `datasets.Dataset`: rows as dicts of plain Python, with features."""

    @property
    def features(self) -> dict[str, Any]:
        return {"x": object(), "label": SimpleNamespace(names=["no", "yes"])}


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


def row(i: int) -> dict[str, Any]:
    return {"x": X[i].tolist(), "label": i % 2, "owner": OWNERS[i]}


def tokens(i: int) -> dict[str, Any]:
    return {"x": torch.tensor(X[i]), "ids": torch.tensor(TOKENS[i])}


def of_pairs(change: Callable[[int], Any]) -> Items:
    """Pairs, of which item 3 has another sample."""
    return Items(lambda i: (change(i) if i == 3 else torch.tensor(X[i]), i % 2))


def same(data: nd.Data, **arrays: Any) -> None:
    """Both have the same samples, and describe them alike."""
    wanted = nd.from_arrays(**arrays, name=data.name)
    assert data.dataset.checksum == wanted.dataset.checksum
    assert (data.notes, data.classes) == (wanted.notes, wanted.classes)
    assert data.dataset.inputs == wanted.dataset.inputs


def test_dicts_are_inputs_by_name() -> None:
    """Also of a function that returns such a data set."""
    pairs = Items(lambda i: (tokens(i), i % 2))
    inputs = {"x": X, "ids": TOKENS}
    same(nd.from_dataset(pairs), x=inputs, y=Y)
    same(nd.from_dataset(pairs, columns=("ids",)), x={"ids": TOKENS}, y=Y)
    same(nd.from_dataset(pairs, columns="x"), x=X, y=Y)
    same(nd.from_dataset(Items(lambda i: tokens(i) | {"y": i % 2}), label="y"), x=inputs, y=Y)
    assert nd.load(lambda: pairs).dataset.inputs.keys() == inputs.keys()


def test_a_table_of_hugging_face() -> None:
    classes = ["no", "yes"]
    data = nd.from_dataset(Table(row), label="label", owner="owner")
    same(data, x=X, y=Y, owner=OWNERS, classes=classes)
    both = nd.from_dataset(Table(row), Table(row, 8), label="label", owner="owner")
    arrays = {"test_x": X[:8], "test_y": Y[:8], "test_owner": OWNERS[:8]}
    same(both, x=X, y=Y, owner=OWNERS, classes=classes, **arrays)
    same(nd.from_dataset(Table(row), label="owner", columns=["x"]), x=X, y=OWNERS)


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (of_pairs(lambda i: X[i, :3]), {}, r"dataset\[3\]\[0\]: has shape \[3\], .* \[4\]; .* pad"),
        (of_pairs(lambda _: "hi"), {}, r"dataset\[3\]\[0\] = 'hi' is refused; allowed: numbers"),
        (of_pairs(lambda _: [[1], [1, 2]]), {}, r"dataset\[3\]\[0\]: value is no array"),
        (of_pairs(lambda _: 1 / 0), {}, "item 3 of dataset failed, .*ZeroDivisionError"),
        (of_pairs(lambda i: X[i].astype("u1")), {}, r"dataset\[3\]\[0\] is uint8, .* float32"),
        (Items(lambda i: (tokens(i) | {"ids": [1] * i}, 0)), {}, r"dataset\[1\]\[0\].ids: has sha"),
        (Items(lambda i: ({"x": 1.0} if i < 3 else 1.0, 0)), {}, r"\[3\]\[0\] = 1.0 .* dict with"),
        (Items(lambda i: (X[i], "a" if i else 1)), {}, r"dataset\[1\]\[1\] is <U1, .* is int64"),
        (Items(lambda i: X[i]), {}, r"dataset\[0\] = array.* allowed: \(sample, label\)"),
        (Items(row), {}, r"dataset\[0\] = {.* of dicts, `label` names the key of the label"),
        (Items(row, 0), {}, "dataset is empty"),
        ({"train": Items(row)}, {}, "dataset is a dict; .* of a dict of data sets, one of them"),
        (Endless(), {}, "dataset is a Endless; allowed: a data set with len"),
        (Items(row), {"label": "labl"}, r"dataset\[0\]: has no 'labl' \(did you mean 'label'"),
        (Items(row), {"label": "label"}, r"dataset\[0\].owner = 'h0' .*; leave out columns of tex"),
        (Items(row), {"label": "label", "columns": "y"}, r"dataset\[0\]: has no 'y'; .* x, owner"),
        (Items(row), {"label": "label", "columns": 3}, "columns = 3 is refused; allowed: a list"),
        (Items(row), {"label": 3}, "label = 3 is refused; allowed: text"),
        (of_pairs(lambda i: X[i]), {"owner": "owner"}, "owner = 'owner' is refused; .* dicts"),
        (of_pairs(lambda i: X[i]), {"columns": ["x"]}, r"columns = \['x'\] .* samples as dicts"),
        (of_pairs(lambda i: X[i]), {"clases": ["x"]}, "clases is unknown .*'classes'"),
        (
            Items(lambda i: row(i) | {"label": None if i == 7 else 0}),
            {"label": "label"},
            r"dataset\[7\].label = None is refused; allowed: numbers or text",
        ),
        (
            Table(lambda i: row(i) | {"label": -1 if i == 5 else i % 2}),
            {"label": "label", "owner": "owner"},
            r"dataset\[5\].label = -1 is refused; allowed: 0 to 1, a number of no, yes",
        ),
        (
            Table(row),
            {"label": "label", "test": Items(row, 4), "owner": "owner"},
            "test has the classes none; allowed: no, yes",
        ),
        (
            Table(row),
            {"label": "label", "test": Items(lambda i: {}, 4), "owner": "owner"},
            r"test\[0\]: has no 'label'",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(dataset: Any, options: Any, message: str) -> None:
    with pytest.raises(nd.UserError, match=message) as error:
        nd.from_dataset(dataset, **options)
    assert "\n" not in str(error.value)
