"""Stage prepare with a user's own files: it writes what they hold, and nothing where they are bad."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pipelines import stage
from plugins.data import datasets
from plugins.data.dataset import Dataset
from tests.pipelines.small import PARAMS


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DVC_ROOT", raising=False)
    return tmp_path


def set_data(folder: Path, line: str) -> None:
    old = next(line for line in PARAMS.splitlines() if line.startswith("data: "))
    (folder / "params.yaml").write_text(PARAMS.replace(old, f"data: {line}"))


def own_arrays(folder: Path) -> None:
    folder.mkdir()
    rng = np.random.default_rng(0)
    for part, n in (("train", 30), ("test", 10)):
        client = np.array(["ada", "bob"])[np.arange(n) % 2]
        np.savez(folder / f"{part}.npz", x=rng.normal(size=(n, 4)), y=np.arange(n) % 3, client=client)


def own_femnist(folder: Path) -> None:
    for part in ("train", "test"):
        (folder / "femnist" / part).mkdir(parents=True)
        data = {name: {"x": [[i / 255] * 784 for i in range(3)], "y": [0, 10, 61]} for name in ("f1", "f0")}
        content = {"users": ["f1", "f0"], "num_samples": [3, 3], "user_data": data}
        (folder / "femnist" / part / "all_data_0.json").write_text(json.dumps(content))


def test_arrays(workplace: Path) -> None:
    set_data(workplace, "{name: arrays, root: mine, normalise: none, validation: 0.1, public: 5}")
    own_arrays(workplace / "mine")
    assert stage.run(["prepare"]) == 0
    found = Dataset.read(workplace / "data" / "arrays.safetensors")
    assert found.checksum == datasets.load("arrays", workplace / "mine", normalise="none").checksum
    assert found.train_owner is not None and found.train_owner.tolist() == [0, 1] * 15
    with np.load(workplace / "mine" / "test.npz") as file:
        assert np.array_equal(found.test_x.numpy(), file["x"].astype(np.float32))


def test_femnist(workplace: Path) -> None:
    set_data(workplace, "{name: femnist, root: leaf, size: null, validation: 0.1, public: 0}")
    own_femnist(workplace / "leaf")
    assert stage.run(["prepare"]) == 0
    found = Dataset.read(workplace / "data" / "femnist.safetensors")
    assert found.checksum == datasets.load("femnist", workplace / "leaf").checksum
    assert found.test_owner is not None and found.test_owner.tolist() == [0, 0, 0, 1, 1, 1]
    assert found.test_x[:, 0, 0, 0].tolist() == [0, 1, 2] * 2 and len(found.classes) == 62


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
def test_refusals(workplace: Path, capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    set_data(workplace, line)
    assert stage.run(["prepare"]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert [file.name for file in workplace.iterdir()] == ["params.yaml"]
