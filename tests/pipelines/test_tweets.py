"""Sentiment140 through all stages: from a CSV and from LEAF's files to a report that says what the data are."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipelines import check, deploy, stage
from plugins.data.dataset import Dataset
from plugins.engines.hashing import weights_sha256
from plugins.models.recurrent import EMBEDDING
from plugins.silo import loopback
from tests.data.tweets import Tweet, both, write

# A warning of mlflow's own use of SQLAlchemy.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")

PARAMS = """\
experiment: tweets
data: {{name: sent140, root: raw, validation: 0, public: 0, users: 8, vocabulary: 40, length: 7, {data}}}
scenario_names: [mixed]
scenarios:
  mixed: {{partition: {partition}, clients: 3, participation: 1.0}}
recipe_names: [rfedavg_plus]
recipes:
  rfedavg_plus: {{rfedavg_plus: {{lam: 0.1}}}}
seeds: [0]
train: {{model: lstm, model_options: {{hidden: 6}}, rounds: 1, epochs: 1, batch_size: 10, optimizer: rmsprop, lr: 0.01,
        device: cpu, engine: {engine}}}
deploy: {{recipe: rfedavg_plus, scenario: mixed, seed: 0, silos: 3, rounds: 1}}
"""
DIRICHLET = "dirichlet, alpha: 1.0, min_size: 3"
ITEM = ["--scenario", "mixed", "--recipe", "rfedavg_plus", "--seed", "0"]
RUN = Path("runs/mixed-rfedavg_plus-0")


def tweets() -> list[Tweet]:
    """Ten users with ten tweets each; what they say goes with how they feel."""
    rng = random.Random(0)
    words = {"0": ["bad", "sad", "awful", "rain"], "4": ["good", "happy", "fine", "sun"]}
    turns = [("04"[rng.randrange(2)], f"user{k}") for _ in range(10) for k in range(10)]
    return [(p, user, " ".join(rng.choices([*words[p], "the", "day"], k=rng.randrange(1, 10)))) for p, user in turns]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    return tmp_path


def configure(data: str = "source: csv", partition: str = DIRICHLET, engine: str = "auto") -> None:
    Path("params.yaml").write_text(PARAMS.format(data=data, partition=partition, engine=engine))


def run_all() -> None:
    stages = (("prepare", []), ("partition", ["--scenario", "mixed", "--seed", "0"]), ("train", ITEM),
              ("evaluate", ITEM), ("report", []))  # fmt: skip
    for name, arguments in stages:
        assert stage.run([name, *arguments]) == 0, name


@pytest.mark.parametrize(("source", "partition"), [("csv", DIRICHLET), ("leaf", "iid")])
def test_from_tweets_to_a_report(folder: Path, source: str, partition: str) -> None:
    said = tweets()
    if source == "csv":
        write(folder / "raw", said)
    else:
        both(folder / "raw", said[:80], said[80:])
    configure(f"source: {source}", partition)
    run_all()
    data = Dataset.read(Path("data/sent140.safetensors"))
    assert (len(data.train_y) + len(data.test_y), data.train_x.shape[1]) == (80, 7)
    assert data.embedding is not None and data.embedding.shape == (12, 300)  # ten words and two specials

    model, record = load_file(RUN / "model.safetensors"), json.loads((RUN / "run.json").read_text())
    assert torch.equal(model[f"params/{EMBEDDING}"], data.embedding)
    assert record["weights_sha256"] == weights_sha256(model)
    assert record["notes"] == list(data.notes) and record["tags"]["leak"] == "none"
    assert record["tags"]["engine"] == "sequential"
    # rFedAvg+ on three clients: before round 1 and after it the model down and phi's mean (6 floats) up.
    lines = (RUN / "rounds.csv").read_text().splitlines()
    row = dict(zip(lines[0].split(","), lines[1].split(","), strict=True))
    trained = sum(leaf.nbytes for key, leaf in model.items() if key.startswith("params/") and EMBEDDING not in key)
    assert trained < float(row["bytes_up"]) / 3 <= trained + 2 * 6 * 4
    metrics = json.loads(Path("evaluation/mixed-rfedavg_plus-0/metrics.json").read_text())
    assert metrics["accuracy"] == pytest.approx(float(row["test_accuracy"]))
    text = Path("report/report.md").read_text()
    assert "- **Data:** sent140; 8 users, drawn at random from the 10 with at least 2 tweets" in text
    assert "word vectors: drawn at random" in text and "LEAK" not in text


def test_counted_traffic_leaves_the_vectors_out(folder: Path) -> None:
    """FNR-FL's count of FedAvg: the trained parameters down and up for each of three clients."""
    write(folder / "raw", tweets())
    configure()
    path = Path("params.yaml")
    path.write_text(path.read_text().replace("{rfedavg_plus: {lam: 0.1}}", "{recipe: fedavg}"))
    run_all()
    metrics = json.loads(Path("evaluation/mixed-rfedavg_plus-0/metrics.json").read_text())
    assert metrics["traffic_mib_as_fnr_counts"] == (metrics["bytes_up"] + metrics["bytes_down"]) / 2**20
    gates = 4 * 6
    trained = gates * (300 + 6 + 2) + gates * (6 + 6 + 2) + 6 * 2 + 2
    assert metrics["bytes_up"] == 3 * 4 * trained


def test_a_leak_in_the_data_is_in_every_table(folder: Path) -> None:
    write(folder / "raw", tweets())
    configure("split: repo")
    run_all()
    assert "test tweets are training tweets" in json.loads((RUN / "run.json").read_text())["tags"]["leak"]
    for name in ("report.md", "report.html", "table.txt"):
        text = Path("report", name).read_text()
        assert "rfedavg_plus LEAK" in text, name
        assert name == "table.txt" or "LEAK: all 8 test tweets are training tweets" in text, name


def test_the_deployments_data_are_the_simulations(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without processes: what they would be given, and its simulation."""
    write(folder / "raw", tweets())
    configure()
    for name, arguments in (("prepare", []), ("partition", ["--scenario", "mixed", "--seed", "0"])):
        assert stage.run([name, *arguments]) == 0
    seen = []
    monkeypatch.setattr(loopback, "run", lambda deployment, parts, folder: loopback.simulate(deployment, parts))
    monkeypatch.setattr(deploy, "write_whole", lambda path, text: seen.append(json.loads(text)))
    assert stage.run(["deploy"]) == 0
    (result,) = seen
    assert len(result["simulated_sha256"]) == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("engine: auto", "engine: vectorized"), "engine 'vectorized': vmap can't take model 'lstm'"),
        (("model: lstm, model_options: {hidden: 6}", "model: cnn"), "model 'cnn' can't take text, which the data set"),
    ],
)
def test_what_can_not_be_trained_is_one_line(
    folder: Path, change: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "raw", tweets())
    configure()
    path = Path("params.yaml")
    path.write_text(path.read_text().replace(*change))
    for name, arguments in (("prepare", []), ("partition", ["--scenario", "mixed", "--seed", "0"])):
        assert stage.run([name, *arguments]) == 0
    capsys.readouterr()
    assert stage.run(["train", *ITEM]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert message in line
    assert not RUN.exists()


def test_a_method_that_makes_samples_is_refused_before_anything_runs(folder: Path) -> None:
    configure()
    path = Path("params.yaml")
    text = path.read_text().replace("recipe_names: [", "recipe_names: [fedftg, ")
    path.write_text(text.replace("\nrecipes:\n", "\nrecipes:\n  fedftg: {}\n"))
    with pytest.raises(ValueError, match=r"recipes.fedftg: fedftg: its generator makes samples by gradients"):
        check.check(None)  # type: ignore[arg-type]  # it has no options
