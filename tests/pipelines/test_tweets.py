"""Sentiment140 through all stages: from a CSV to a report that says what the
data are."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.engines.hashing import weights_sha256
from fedml_noniid.models.recurrent import EMBEDDING
from fedml_noniid.pipelines.experiment import check, config
from tests.data.tweets import Tweet, write
from tests.pipelines.small import run_stages

PARAMS = """\
experiment: tweets
data:
  {name: sent140, root: raw, validation: 0, public: 0, users: 8, vocabulary: 40, length: 7,
   pick: random}
scenario_names: [mixed]
scenarios:
  mixed: {partition: dirichlet, alpha: 1.0, min_size: 3, clients: 3, participation: 1.0}
recipe_names: [rfedavg_plus]
recipes:
  rfedavg_plus: {rfedavg_plus: {lam: 0.1}}
seeds: [0]
train:
  {model: lstm, model_options: {hidden: 6}, rounds: 1, epochs: 1, batch_size: 10, optimizer:
   rmsprop, lr: 0.01,
        device: cpu, engine: auto}
deploy: {recipe: rfedavg_plus, scenario: mixed, seed: 0, silos: 3, rounds: 1}
"""
RUN = "runs/mixed-rfedavg_plus-0"
ALL = ("prepare", "partition", "train", "evaluate", "report")


def tweets() -> list[Tweet]:
    """Ten users with ten tweets each; what they say goes with how they feel."""
    rng = random.Random(0)
    words = {"0": ["bad", "sad", "awful", "rain"], "4": ["good", "happy", "fine", "sun"]}
    turns = [("04"[rng.randrange(2)], f"user{k}") for _ in range(10) for k in range(10)]
    return [
        (p, user, " ".join(rng.choices([*words[p], "the", "day"], k=rng.randrange(1, 10))))
        for p, user in turns
    ]


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    write(tmp_path / "raw", tweets())
    (tmp_path / "params.yaml").write_text(PARAMS)
    return tmp_path


def change(folder: Path, old: str, new: str) -> None:
    text = (folder / "params.yaml").read_text()
    assert old in text
    (folder / "params.yaml").write_text(text.replace(old, new, 1))


def test_from_tweets_to_a_report(experiment: Path) -> None:
    run_stages(experiment, ALL)
    data = Dataset.read(experiment / "data" / "sent140.safetensors")
    assert (len(data.train_y) + len(data.test_y), data.train_x.shape[1]) == (80, 7)
    # ten words and two specials
    assert data.embedding is not None and data.embedding.shape == (12, 300)
    model = load_file(experiment / RUN / "model.safetensors")
    record = json.loads((experiment / RUN / "run.json").read_text())
    assert torch.equal(model[f"params/{EMBEDDING}"], data.embedding)
    assert record["weights_sha256"] == weights_sha256(model)
    assert record["notes"] == list(data.notes) and record["tags"]["leak"] == "none"
    assert record["tags"]["engine"] == "sequential"
    # rFedAvg+ on three clients: before round 1 and after it the model down and phi's mean (6
    # floats) up. The vectors don't travel.
    (row,) = pd.read_csv(experiment / RUN / "rounds.csv").to_dict("records")
    parts = {key: leaf for key, leaf in model.items() if key.startswith("params/")}
    trained = sum(leaf.nbytes for key, leaf in parts.items() if EMBEDDING not in key)
    assert trained < row["bytes_up"] / 3 <= trained + 2 * 6 * 4
    text = (experiment / "report" / "report.md").read_text()
    assert "sent140; 8 users, drawn at random from the 10 with at least 2 tweets" in text
    assert "word vectors: drawn at random" in text and "LEAK" not in text


def test_a_leak_in_the_data_is_in_every_table(experiment: Path) -> None:
    change(experiment, "pick: random", "split: repo")
    run_stages(experiment, ALL)
    record = json.loads((experiment / RUN / "run.json").read_text())
    assert "test tweets are training tweets" in record["tags"]["leak"]
    for name in ("report.md", "report.html", "table.txt"):
        text = (experiment / "report" / name).read_text()
        assert "rfedavg_plus LEAK" in text, name
        assert name == "table.txt" or "LEAK: all 8 test tweets are training tweets" in text, name


def test_a_method_that_makes_samples_is_refused_before_anything_runs(experiment: Path) -> None:
    change(experiment, "recipe_names: [", "recipe_names: [fedftg, ")
    change(experiment, "\nrecipes:\n", "\nrecipes:\n  fedftg: {}\n")
    with pytest.raises(UserError, match=r"recipes.fedftg: fedftg: its generator makes samples"):
        check.check(config.load(experiment))
