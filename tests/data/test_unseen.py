"""Data read without some owners are those of a user who never had these owners' samples."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray

import fedml_noniid as nd

RNG = np.random.default_rng(0)
OWNER = np.array(["ward a", "ward b", "ward c", "ward d"])[np.arange(80) % 4]
OTHERS = OWNER != "ward d"
X = RNG.normal(size=(80, 3)) * np.where(OTHERS, 1, 1000)[:, None]  # another scale
Y = np.where(X[:, 0] > 0, 2, 0)
Y[~OTHERS] = np.arange(20) % 3  # class 1 is of ward d alone
NAMES = ["well", "odd", "ill"]
WORDS = np.where(X[:, 1] > 0, "a fine day", np.where(OTHERS, "rain again", "zebra"))

Rows = NDArray[np.bool_]
ALL = np.ones(80, dtype=bool)


def of_arrays(rows: Rows, **options: Any) -> nd.Data:
    return nd.from_arrays(X[rows], Y[rows], owner=OWNER[rows], **options)


def of_names(rows: Rows) -> nd.Data:
    """Numbers of classes in an order of one's own."""
    names = NAMES if rows.all() else ["well", "ill"]
    y = Y[rows] if rows.all() else Y[rows] // 2
    return nd.from_arrays(X[rows], y, owner=OWNER[rows], classes=names)


def of_two_parts(rows: Rows) -> nd.Data:
    first = np.arange(80) < 60
    names = {"x": X, "y": Y, "owner": OWNER}
    train, test = ({key: v[rows & part] for key, v in names.items()} for part in (first, ~first))
    return nd.from_arrays(**train, **{f"test_{key}": v for key, v in test.items()})


def of_inputs(rows: Rows) -> nd.Data:
    x = {"size": X[rows, :2], "weight": X[rows, 2]}
    return nd.from_arrays(x, Y[rows], owner=np.arange(80)[rows] % 4)


def of_reader(rows: Rows) -> nd.Data:
    def read(*, scale: float) -> dict[str, Any]:
        return {"x": scale * X[rows], "y": Y[rows], "owner": OWNER[rows]}

    return nd.load(read, scale=2.0)


def of_texts(rows: Rows) -> nd.Data:
    frame = pd.DataFrame({"text": WORDS, "mood": Y, "site": OWNER})[rows]
    return nd.from_texts(frame, text="text", label="mood", owner="site", length=4)


FORMS = [of_arrays, of_names, of_two_parts, of_inputs, of_reader, of_texts]


@pytest.mark.parametrize("form", FORMS)
def test_nothing_of_an_owner_that_takes_no_part_remains(form: Callable[[Rows], nd.Data]) -> None:
    whole, never = form(ALL), form(OTHERS)
    data = whole.without(["3" if form is of_inputs else "ward d"])
    for key in ("train_x", "train_y", "test_x", "test_y", "train_owner", "test_owner"):
        assert torch.equal(getattr(data.dataset, key), getattr(never.dataset, key)), key
    for key in ("mean", "std", "classes", "owner_names", "notes"):
        assert getattr(data.dataset, key) == getattr(never.dataset, key), key
    assert data.dataset.unseen_y is not None and data.dataset.unseen_x is not None
    order = np.argsort(np.arange(80)[~OTHERS] >= 60, kind="stable")
    assert data.dataset.unseen_y.tolist() == [(0, -1, 1)[y] for y in Y[~OTHERS][order]]
    if form is of_texts:  # both are one unknown word
        tokens, unknown = data.dataset.unseen_x.numpy(), WORDS[~OTHERS] == "zebra"
        assert len({*map(tuple, tokens[unknown].tolist())}) == 1
        assert (
            tokens[~unknown].tolist() == data.samples(["a fine day"] * int(sum(~unknown))).tolist()
        )
    else:
        scale = 2 if form is of_reader else 1
        wanted = torch.from_numpy(scale * X[~OTHERS]).to(data.dataset.unseen_x.dtype)
        torch.testing.assert_close(data.dataset.unseen_x.flatten(1), wanted)


def test_files_of_arrays_are_read_anew(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", x=X, y=np.array(NAMES)[Y], client=OWNER, classes=NAMES)
    whole = nd.load("arrays", root=tmp_path)
    data = whole.without(["ward d"])
    never = of_names(OTHERS)
    assert torch.equal(data.dataset.train_x, never.dataset.train_x)
    assert (data.classes, data.dataset.mean) == (("well", "ill"), never.dataset.mean)
    (tmp_path / "train.npz").unlink()
    with pytest.raises(nd.UserError, match=r"unseen.*train.npz: there is no such file"):
        whole.without(["ward d"])
    assert data.dataset.unseen_names == ("ward d",)


def alone_in_the_test() -> nd.Data:
    only = OWNER == "ward d"
    x, y, owner = X[only], Y[only] % 2 * 2, OWNER[only]
    return nd.from_arrays(X, Y, owner=OWNER, test_x=x, test_y=y, test_owner=owner)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (alone_in_the_test, "test_owner: all are of owners that take no part"),
        (lambda: nd.from_arrays(X, X[:, 0], owner=OWNER), "allowed: classes with owners"),
        (lambda: nd.from_arrays(X, Y), "data set 'arrays' can't be read without an owner"),
        (lambda: of_arrays(OWNER != "ward a"), "2"),
    ],
)
def test_data_that_have_no_such_owners_are_refused(make: Callable[[], nd.Data], words: str) -> None:
    with pytest.raises(nd.UserError, match=r"^unseen") as error:
        make().without(2 if words == "2" else ["ward d"])
    assert words in str(error.value)
