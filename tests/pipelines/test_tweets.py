"""Sentiment140 through all stages: from a CSV to a report that says what the
data are."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fedml_noniid.pipelines.experiment import check, config
from fedml_noniid.pipelines.stages import deploy
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.dataset import Dataset
from fedml_noniid.plugins.engines.hashing import weights_sha256
from fedml_noniid.plugins.models.recurrent import EMBEDDING
from fedml_noniid.plugins.silo import loopback
from tests.data.tweets import Tweet, write
from tests.pipelines.small import run_stages

# A warning of mlflow's own use of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

PARAMS = """\
experiment: tweets
data:
  {{name: sent140, root: raw, validation: 0, public: 0, users: 8, vocabulary: 40, length: 7,
   {data}}}
scenario_names: [mixed]
scenarios:
  mixed: {{partition: {partition}, clients: 3, participation: 1.0}}
recipe_names: [rfedavg_plus]
recipes:
  rfedavg_plus: {{rfedavg_plus: {{lam: 0.1}}}}
seeds: [0]
train:
  {{model: lstm, model_options: {{hidden: 6}}, rounds: 1, epochs: 1, batch_size: 10, optimizer:
   rmsprop, lr: 0.01,
        device: cpu, engine: {engine}}}
deploy: {{recipe: rfedavg_plus, scenario: mixed, seed: 0, silos: 3, rounds: 1}}
"""
DIRICHLET = "dirichlet, alpha: 1.0, min_size: 3"
RUN, EVALUATION = "runs/mixed-rfedavg_plus-0", "evaluation/mixed-rfedavg_plus-0"
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


def configure(
    folder: Path,
    data: str = "pick: random",
    partition: str = DIRICHLET,
    engine: str = "auto",
    *changes: tuple[str, str],
) -> None:
    text = PARAMS.format(data=data, partition=partition, engine=engine)
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    (folder / "params.yaml").write_text(text)


def test_from_tweets_to_a_report(tmp_path: Path) -> None:
    write(tmp_path / "raw", tweets())
    configure(tmp_path)
    run_stages(tmp_path, ALL)
    data = Dataset.read(tmp_path / "data" / "sent140.safetensors")
    assert (len(data.train_y) + len(data.test_y), data.train_x.shape[1]) == (80, 7)
    assert data.embedding is not None and data.embedding.shape == (
        12,
        300,
    )  # ten words and two specials

    model, record = (
        load_file(tmp_path / RUN / "model.safetensors"),
        json.loads((tmp_path / RUN / "run.json").read_text()),
    )
    assert torch.equal(model[f"params/{EMBEDDING}"], data.embedding)
    assert record["weights_sha256"] == weights_sha256(model)
    assert record["notes"] == list(data.notes) and record["tags"]["leak"] == "none"
    assert record["tags"]["engine"] == "sequential"
    # rFedAvg+ on three clients: before round 1 and after it the model down and phi's mean (6
    # floats) up.
    lines = (tmp_path / RUN / "rounds.csv").read_text().splitlines()
    row = dict(zip(lines[0].split(","), lines[1].split(","), strict=True))
    trained = sum(
        leaf.nbytes
        for key, leaf in model.items()
        if key.startswith("params/") and EMBEDDING not in key
    )
    assert trained < float(row["bytes_up"]) / 3 <= trained + 2 * 6 * 4
    metrics = json.loads((tmp_path / EVALUATION / "metrics.json").read_text())
    assert metrics["accuracy"] == pytest.approx(float(row["test_accuracy"]))
    text = (tmp_path / "report" / "report.md").read_text()
    assert (
        "- **Data:** sent140; 8 users, drawn at random from the 10 with at least 2 tweets" in text
    )
    assert "word vectors: drawn at random" in text and "LEAK" not in text


def test_counted_traffic_leaves_the_vectors_out(tmp_path: Path) -> None:
    """FNR-FL's count of FedAvg: the trained parameters down and up for each of three clients."""
    write(tmp_path / "raw", tweets())
    configure(
        tmp_path,
        "pick: random",
        DIRICHLET,
        "auto",
        ("{rfedavg_plus: {lam: 0.1}}", "{recipe: fedavg}"),
    )
    run_stages(tmp_path, ALL)
    metrics = json.loads((tmp_path / EVALUATION / "metrics.json").read_text())
    assert (
        metrics["traffic_mib_as_fnr_counts"]
        == (metrics["bytes_up"] + metrics["bytes_down"]) / 2**20
    )
    gates = 4 * 6
    trained = gates * (300 + 6 + 2) + gates * (6 + 6 + 2) + 6 * 2 + 2
    assert metrics["bytes_up"] == 3 * 4 * trained


def test_a_leak_in_the_data_is_in_every_table(tmp_path: Path) -> None:
    write(tmp_path / "raw", tweets())
    configure(tmp_path, "split: repo")
    run_stages(tmp_path, ALL)
    assert (
        "test tweets are training tweets"
        in json.loads((tmp_path / RUN / "run.json").read_text())["tags"]["leak"]
    )
    for name in ("report.md", "report.html", "table.txt"):
        text = (tmp_path / "report" / name).read_text()
        assert "rfedavg_plus LEAK" in text, name
        assert name == "table.txt" or "LEAK: all 8 test tweets are training tweets" in text, name


def test_the_deployments_data_are_the_simulations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without processes: what they would be given, and its simulation."""
    write(tmp_path / "raw", tweets())
    configure(tmp_path)
    run_stages(tmp_path, ("prepare", "partition"))
    seen = []
    monkeypatch.setattr(
        loopback, "run", lambda deployment, parts, folder: loopback.simulate(deployment, parts)
    )
    monkeypatch.setattr(deploy, "write_whole", lambda path, text: seen.append(json.loads(text)))
    run_stages(tmp_path, ("deploy",))
    (result,) = seen
    assert len(result["simulated_sha256"]) == 64


def test_a_method_that_makes_samples_is_refused_before_anything_runs(tmp_path: Path) -> None:
    more = (
        ("recipe_names: [", "recipe_names: [fedftg, "),
        ("\nrecipes:\n", "\nrecipes:\n  fedftg: {}\n"),
    )
    configure(tmp_path, "pick: random", DIRICHLET, "auto", *more)
    with pytest.raises(
        UserError, match=r"recipes.fedftg: fedftg: its generator makes samples by gradients"
    ):
        check.check(config.load(tmp_path))
