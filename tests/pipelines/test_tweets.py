"""Sentiment140 through all stages: from a CSV to a report that says what the
data are."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pandas as pd
import torch
from safetensors.torch import load_file

from fedml_noniid.data.dataset import Dataset
from fedml_noniid.models.recurrent import EMBEDDING
from tests.data.tweets import Tweet, write
from tests.pipelines.small import run_stages

PARAMS = """\
experiment: tweets
data:
  {name: sent140, root: raw, validation: 0, public: 0, users: 8, vocabulary: 40, length: 7,
   split: repo}
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


def test_a_leak_in_the_data_is_in_every_table(tmp_path: Path) -> None:
    write(tmp_path / "raw", tweets())
    (tmp_path / "params.yaml").write_text(PARAMS)
    run_stages(tmp_path, ALL)
    data = Dataset.read(tmp_path / "data" / "sent140.safetensors")
    model = load_file(tmp_path / RUN / "model.safetensors")
    assert torch.equal(model[f"params/{EMBEDDING}"], data.embedding)
    # rFedAvg+ on three clients: before round 1 and after it the model down and phi's mean (6
    # floats) up. The vectors don't travel.
    (row,) = pd.read_csv(tmp_path / RUN / "rounds.csv").to_dict("records")
    parts = {key: leaf for key, leaf in model.items() if key.startswith("params/")}
    sent = sum(leaf.nbytes for key, leaf in parts.items() if EMBEDDING not in key)
    assert sent < row["bytes_up"] / 3 <= sent + 2 * 6 * 4
    record = json.loads((tmp_path / RUN / "run.json").read_text())
    assert "test tweets are training tweets" in record["tags"]["leak"]
    for name in ("report.md", "report.html", "table.txt"):
        text = (tmp_path / "report" / name).read_text()
        assert "rfedavg_plus LEAK" in text, name
        assert name == "table.txt" or "LEAK: all 8 test tweets are training tweets" in text, name
