"""Stage prepare with a user's own files: it writes what they hold, and nothing where they are bad."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from fedml_noniid.pipelines.stages import __main__ as stage
from fedml_noniid.plugins.data import datasets
from fedml_noniid.plugins.data.dataset import Dataset
from tests.pipelines.small import PARAMS, run_stages


def set_data(folder: Path, line: str) -> None:
    old = next(line for line in PARAMS.splitlines() if line.startswith("data: "))
    (folder / "params.yaml").write_text(PARAMS.replace(old, f"data: {line}"))


def own_arrays(folder: Path) -> None:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for part, n in (("train", 30), ("test", 10)):
        client = np.array(["ada", "bob"])[np.arange(n) % 2]
        np.savez(folder / f"{part}.npz", x=rng.normal(size=(n, 4)), y=np.arange(n) % 3, client=client)


def own_femnist(folder: Path, names: Sequence[str], n: int, pixel: Callable[[int], int]) -> None:
    """LEAF's files: `n` images, each of one grey, of each writer in each part; the labels are 0, 10 and 61 in turn."""
    for part in ("train", "test"):
        (folder / "femnist" / part).mkdir(parents=True)
        greys = {name: [int(pixel(i % 3)) for i in range(n)] for name in names}
        data = {
            name: {"x": [[grey / 255] * 784 for grey in of], "y": [(0, 10, 61)[i % 3] for i in range(n)]}
            for name, of in greys.items()
        }
        content = {"users": names, "num_samples": [n] * len(names), "user_data": data}
        (folder / "femnist" / part / "all_data_0.json").write_text(json.dumps(content))


def test_arrays(tmp_path: Path) -> None:
    set_data(tmp_path, "{name: arrays, root: mine, normalise: none, validation: 0.1, public: 5}")
    own_arrays(tmp_path / "mine")
    run_stages(tmp_path, ("prepare",))
    found = Dataset.read(tmp_path / "data" / "arrays.safetensors")
    assert found.checksum == datasets.load("arrays", tmp_path / "mine", normalise="none").checksum
    assert found.train_owner is not None and found.train_owner.tolist() == [0, 1] * 15
    with np.load(tmp_path / "mine" / "test.npz") as file:
        assert np.array_equal(found.test_x.numpy(), file["x"].astype(np.float32))


def test_femnist(tmp_path: Path) -> None:
    set_data(tmp_path, "{name: femnist, root: leaf, size: null, validation: 0.1, public: 0}")
    own_femnist(tmp_path / "leaf", ["f1", "f0"], 3, lambda label: label)
    run_stages(tmp_path, ("prepare",))
    found = Dataset.read(tmp_path / "data" / "femnist.safetensors")
    assert found.checksum == datasets.load("femnist", tmp_path / "leaf").checksum
    assert found.test_owner is not None and found.test_owner.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.test_x[:, 0, 0, 0].tolist() == [0, 1, 2] * 2 and len(found.classes) == 62


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # of mlflow's own use of SQLAlchemy
@pytest.mark.parametrize(("partition", "writers"), [("natural", [1, 1]), ("natural_grouped", [2, 2])])
def test_femnist_from_files_to_an_evaluated_round(tmp_path: Path, partition: str, writers: list[int]) -> None:
    """Four writers of three classes in LEAF's files: two clients, one writer or two each, and their own test images."""
    rng = np.random.default_rng(1)
    own_femnist(tmp_path / "leaf", ["w0", "w1", "w2", "w3"], 12, lambda label: rng.integers(0, 60) + 60 * label)
    set_data(tmp_path, "{name: femnist, root: leaf, validation: 0, public: 0}")
    text = (tmp_path / "params.yaml").read_text()
    text = text.replace("partition: dirichlet, clients: 4, alpha: 0.5", f"partition: {partition}, clients: 2")
    text = text.replace("model: mlp, rounds: 3", "model: cnn, model_options: {channels: 2, hidden: 8}, rounds: 1")
    (tmp_path / "params.yaml").write_text(text.replace("[fedavg, scaffold+fnr]", "[fedavg]"))
    run_stages(tmp_path, ("prepare", "partition", "train", "evaluate", "report"))

    data = Dataset.read(tmp_path / "data" / "femnist.safetensors")
    indices = json.loads((tmp_path / "partitions" / "skewed-0" / "indices.json").read_text())
    assert data.train_owner is not None and data.test_owner is not None
    owners = [set(data.train_owner[part].tolist()) for part in indices["clients"]]
    assert list(map(len, owners)) == writers and not owners[0] & owners[1]
    assert [set(data.test_owner[part].tolist()) for part in indices["test_clients"]] == owners
    with (tmp_path / "evaluation" / "skewed-fedavg-0" / "per_client.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["test_samples"]) for row in rows] == [12 * n for n in writers]
    assert all(0 <= float(row["test_accuracy"]) <= 1 for row in rows)
    metrics = json.loads((tmp_path / "evaluation" / "skewed-fedavg-0" / "metrics.json").read_text())
    assert 0 <= metrics["accuracy"] <= 1 and (tmp_path / "report" / "report.html").is_file()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{name: arrays, root: mine, validation: 0.1, public: 5}", "mine/train.npz: there is no such file; needed: "),
        ("{name: femnist, root: mine, validation: 0.1, public: 5}", "mine/femnist/train: holds no *.json; make them"),
        ("{name: cinic10, root: mine, validation: 0.1, public: 5}", "mine/cinic-10/train: there is no such folder; "),
        (
            "{name: emnist, root: mine, split: letter, validation: 0.1, public: 5}",
            "params.yaml: data: data set emnist: split 'letter' is unknown (did you mean 'letters'?); allowed: byclass",
        ),
    ],
)
def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    set_data(tmp_path, line)
    assert stage.main(["prepare", "--root", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["params.yaml"]
