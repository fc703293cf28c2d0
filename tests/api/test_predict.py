"""Final models in use: the predictions of `Result.predict` are those that the evaluation has
counted."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fedml_noniid as nd
from fedml_noniid.core.errors import UserError

RNG = np.random.default_rng(0)
QUIET: dict[str, Any] = {"partition": "iid", "clients": 4, "rounds": 2, "progress": False}
DIGITS = nd.load("digits")
ROWS = pd.DataFrame(
    {"age": RNG.integers(20, 80, 200), "ward": RNG.choice(["north", "south", "east"], 200)}
)
ROWS = ROWS.assign(ill=np.where(ROWS.age + 20 * (ROWS.ward == "east") > 55, "yes", "no"))
TABLE = nd.from_frame(
    ROWS[:150], ROWS[150:], label="ill", owner="ward", features=["age"], one_hot=None
)


def accuracy(result: nd.Result, x: object, seed: int, **given: int) -> float:
    names = np.array(result.data.classes)[result.data.dataset.test_y.numpy()]
    return float((result.predict(x, seed, **given) == names).mean())


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_predictions_have_the_accuracy_of_the_evaluation(model: str) -> None:
    result = nd.run("fedavg", DIGITS, model=model, seeds=[3, 5], **QUIET)
    x = DIGITS.dataset.test_x
    for seed, row in result.metrics.set_index("seed").iterrows():
        assert accuracy(result, x, seed) == accuracy(result, x.numpy(), seed) == row["accuracy"]
    assert (
        result.predict(x).tolist() == result.predict(x, 3).tolist() != result.predict(x, 5).tolist()
    )


def test_the_model_is_a_module_with_the_weights() -> None:
    result = nd.run("fedavg", DIGITS, **QUIET)
    model, x = result.model(0), DIGITS.dataset.test_x
    state = model.state_dict()
    assert isinstance(model, torch.nn.Module)
    assert not model.training
    assert {name: leaf.tolist() for name, leaf in result.weights[0].items()} == {
        k: v.tolist() for k, v in state.items()
    }
    before = x.clone()
    hidden = torch.relu(
        DIGITS.dataset.normalised("test").flatten(1) @ state["fc1.weight"].T + state["fc1.bias"]
    )
    torch.testing.assert_close(model(x), hidden @ state["fc2.weight"].T + state["fc2.bias"])
    assert torch.equal(x, before)
    model(x).sum().backward()  # it can be trained further
    assert pickle.loads(pickle.dumps(result)).predict(x).tolist() == result.predict(x).tolist()


def test_texts_and_arrays_are_read_as_the_data_were() -> None:
    lines = pd.DataFrame(
        [("a good day", "glad"), ("a bad day", "sad")] * 10, columns=["line", "mood"]
    )
    texts = nd.from_texts(lines, lines[:4], text="line", label="mood", length=5)
    assert torch.equal(
        texts.samples(["a good day", "A bad, bad thing"])[0].int(), texts.dataset.test_x[0]
    )
    images = RNG.integers(0, 256, (40, 6, 5, 3), dtype=np.uint8)
    data = nd.from_arrays(images, np.arange(40) % 2, images[:9], np.arange(9) % 2, layout="HWC")
    assert torch.equal(data.samples(images[:9]), data.dataset.test_x)


@pytest.mark.parametrize("missing", ["median", "mode", None])
def test_rows_and_texts_of_files_are_read_by_the_names_of_their_columns(
    tmp_path: Path, missing: str | None
) -> None:
    """Also a single row: medians and categories are those of the training rows."""
    rows = ROWS.assign(age=ROWS.age.where(ROWS.age % 5 != 0)) if missing else ROWS
    parts = {"file": "train.csv", "test_file": "test.csv"}
    for name, part in zip(parts.values(), (rows[:150], rows[150:]), strict=True):
        part.to_csv(tmp_path / name, index=False)
    how: dict[str, Any] = {"label": "ill", "one_hot": ["ward"], "missing": missing}
    loaded = nd.load("table", root=tmp_path, **parts, **how)
    for data in (loaded, nd.from_frame(rows[:150], rows[150:], **how)):
        known = data.dataset.test_x
        assert torch.equal(known, loaded.dataset.test_x)
        assert torch.equal(data.samples(rows[150:]), known)
        for i in range(9):
            assert torch.equal(data.samples(rows[["ward", "age"]][150 + i : 151 + i]), known[[i]])
        assert torch.equal(data.samples(known), known)
    texts = nd.load("text", root=tmp_path, text="ward", label="ill", length=2, **parts)
    assert torch.equal(texts.samples(rows[150:]), texts.dataset.test_x)
    assert torch.equal(texts.samples(rows["ward"][150:].tolist()), texts.dataset.test_x)


def test_new_rows_are_read_whatever_labels_the_training_rows_have() -> None:
    """Five classes in eight training rows: too many for a data set with fewer samples per class."""
    frame = pd.DataFrame({"a": np.arange(10.0), "y": [0, 1, 2, 3, 4] * 2})
    data = nd.from_frame(frame, label="y")
    assert len(data.dataset.train_y) < 2 * len(data.classes)
    assert data.samples(frame[["a"]]).tolist() == [[value] for value in range(10)]


@pytest.mark.parametrize("recipe", ["fedbn", "ditto", "fedproto"])
def test_clients_with_a_model_of_their_own(recipe: str) -> None:
    result = nd.run(
        recipe, DIGITS, model_options={"batch_norm": True}, **{**QUIET, "rounds": 1, "clients": 2}
    )
    own = [result.model(0, client).state_dict() for client in (0, 1)]
    assert any(not torch.equal(own[0][name], own[1][name]) for name in own[0])
    for client in (None, 2, -1):
        with pytest.raises(
            nd.UserError, match=r"model: client = .* is refused; allowed: 0 to 1, as each"
        ):
            result.model(0, client)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (
            np.zeros((2, 8, 8)),
            r"predict: x is float64 \[2, 8, 8\]; allowed: numbers \[n, 1, 8, 8\]",
        ),
        (
            np.full((2, 1, 8, 8), 0.5),
            r"predict: x\[0, 0, 0, 0\] = 0.5 is refused; allowed: whole numbers from 0 to 255",
        ),
        (np.full((1, 1, 8, 8), -1), "predict: x.* is refused; allowed: whole numbers from 0"),
        ("text", "predict: x is <U4"),
        (pd.DataFrame({"a": [1]}), "predict: x is int64"),
    ],
)
def test_samples_that_do_not_fit_are_refused(x: object, words: str) -> None:
    with pytest.raises(nd.UserError, match=f"^{words}"):
        RESULT.predict(x)


RESULT = nd.run("fedavg", DIGITS, **QUIET)


def test_a_seed_a_client_and_a_column_that_are_not_there() -> None:
    with pytest.raises(nd.UserError, match=r"model: seed = 7 has no result; allowed: 0"):
        RESULT.model(7)
    with pytest.raises(
        nd.UserError, match=r"model: client = 1 is refused; allowed: none, as all have one model"
    ):
        RESULT.predict(DIGITS.dataset.test_x, client=1)
    result = nd.run("fedavg", TABLE, **QUIET)
    with pytest.raises(nd.UserError, match=r"^predict: x: column 'age' is unknown"):
        result.predict(pd.DataFrame({"ag": [3]}))
    with pytest.raises(nd.UserError, match=r"^predict: x: column 'age' is 'old' in row 1"):
        result.predict(pd.DataFrame({"age": ["old"]}))


def test_no_row_is_left_out_without_a_word() -> None:
    """With `missing="drop"` a row with an empty cell has no sample, so the classes behind it would
    move up."""
    frame = pd.DataFrame({"a": [-1.0, 1.0] * 40, "b": [0.0, 2.0] * 40, "y": ["low", "high"] * 40})
    data = nd.from_frame(frame, label="y", missing="drop")
    rows = pd.DataFrame({"a": [1.0, None, -1.0], "b": [2.0, 0.0, 0.0]})
    with pytest.raises(UserError, match=r"x: column 'a' has no value in row 2; allowed: fill or "):
        data.samples(rows)
    assert len(data.samples(rows.dropna())) == 2


def test_rows_that_were_left_out_do_not_shift_the_categories_of_new_ones() -> None:
    """Whatever categories the rows with empty cells had."""
    for seed in range(12):
        rng = np.random.default_rng(seed)
        ward = rng.choice(["a", "b", "c"], 150).astype(object)
        for rare in ("er", "icu", "lab", "zoo"):
            ward[rng.integers(150)] = rare
        age = np.where(rng.random(150) < 0.2, np.nan, rng.normal(size=150))
        frame = pd.DataFrame({"ward": ward, "age": age, "y": np.where(ward == "a", "ill", "well")})
        data = nd.from_frame(frame, label="y", one_hot=["ward"], missing="drop")
        new = data.samples(pd.DataFrame({"ward": ["a", "b", "c"], "age": [0.0] * 3}))
        (order,) = (note for note in data.notes if "in this order: " in note)
        columns = order.partition("in this order: ")[2].split(", ")
        assert [columns[int(row[:-1].argmax())] for row in new] == ["ward=a", "ward=b", "ward=c"]
