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

RNG = np.random.default_rng(0)
QUIET: dict[str, Any] = {"partition": "iid", "clients": 4, "rounds": 2, "progress": False}
DIGITS = nd.load("digits")
ROWS = pd.DataFrame(
    {"age": RNG.integers(20, 80, 200), "ward": RNG.choice(["north", "south", "east"], 200)}
)
ROWS = ROWS.assign(ill=np.where(ROWS.age + 20 * (ROWS.ward == "east") > 55, "yes", "no"))


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_predictions_have_the_accuracy_of_the_evaluation(model: str) -> None:
    result = nd.run("fedavg", DIGITS, model=model, seeds=[3, 5], **QUIET)
    x, names = DIGITS.dataset.test_x, np.array(DIGITS.classes)[DIGITS.dataset.test_y.numpy()]
    for seed, row in result.metrics.set_index("seed").iterrows():
        answers = result.predict(x, seed)
        assert (answers == names).mean() == row["accuracy"]
        assert (answers == result.predict(x.numpy(), seed)).all()
    first, third, fifth = (result.predict(x, seed).tolist() for seed in (None, 3, 5))
    assert first == third != fifth


def test_the_model_is_a_module_with_the_weights() -> None:
    result = nd.run("fedavg", DIGITS, **QUIET)
    model, x = result.model(0), DIGITS.dataset.test_x
    state, before = model.state_dict(), x.clone()
    assert isinstance(model, torch.nn.Module) and not model.training
    weights = result.weights[0]
    assert sorted(weights) == sorted(state)
    assert all(torch.equal(state[name], leaf) for name, leaf in weights.items())
    images = DIGITS.dataset.normalised("test").flatten(1)
    hidden = torch.relu(images @ state["fc1.weight"].T + state["fc1.bias"])
    torch.testing.assert_close(model(x), hidden @ state["fc2.weight"].T + state["fc2.bias"])
    assert torch.equal(x, before)
    model(x).sum().backward()  # it can be trained further
    assert pickle.loads(pickle.dumps(result)).predict(x).tolist() == result.predict(x).tolist()


@pytest.mark.parametrize("missing", ["median", None])
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
    known = loaded.dataset.test_x
    for data in (loaded, nd.from_frame(rows[:150], rows[150:], **how)):
        one_row = rows[["ward", "age"]][157:158]
        for samples, wanted in ((rows[150:], known), (one_row, known[[7]]), (known, known)):
            assert torch.equal(data.samples(samples), wanted)
    texts = nd.load("text", root=tmp_path, text="ward", label="ill", length=2, **parts)
    for words in (rows[150:], rows["ward"][150:].tolist()):
        assert torch.equal(texts.samples(words), texts.dataset.test_x)


@pytest.mark.parametrize("recipe", ["fedbn", "ditto", "fedproto"])
def test_clients_with_a_model_of_their_own(recipe: str) -> None:
    how = {**QUIET, "rounds": 1, "clients": 2, "model_options": {"batch_norm": True}}
    result = nd.run(recipe, DIGITS, **how)
    own = [result.model(0, client).state_dict() for client in (0, 1)]
    assert any(not torch.equal(own[0][name], own[1][name]) for name in own[0])
    for client in (None, 2, -1):
        with pytest.raises(nd.UserError, match=r"client = .* is refused; allowed: 0 to 1, as each"):
            result.model(0, client)
