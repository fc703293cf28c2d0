"""`noniid check` refuses what a stage would refuse once it has the data."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedml_noniid.cli.app import main
from fedml_noniid.data import datasets
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.engines import device
from fedml_noniid.engines.device import Gpus
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages import plan
from fedml_noniid.pipelines.verbs import fits
from tests.pipelines.small import PARAMS, run_stages

DEALT = "partition: dirichlet, clients: 4, alpha: 0.5"
# What is replaced in PARAMS -> the beginning and a part of the one line. scikit-learn's digits:
# 1,437 training samples.
CASES = {
    "clients": (
        "clients: 4",
        "clients: 2000",
        "scenarios.skewed.clients = 2000 is refused",
        "1 to ",
    ),
    "classes": (
        DEALT,
        "partition: by_classes, clients: 2, classes: [[0, 12], [1]]",
        "scenarios.skewed.",
        "12",
    ),
    "owners": (
        DEALT,
        "partition: natural, clients: 4",
        "scenarios.skewed: partition natural: ",
        "whose samples",
    ),
    "sizes": (
        DEALT,
        "partition: by_sizes, clients: 2, sizes: [1000, 1000]",
        "scenarios.skewed.",
        "sizes",
    ),
    "public": ("public: 50", "public: 5000", "data.public = 5000 is refused", "class-balanced"),
    "model": ("model: mlp", "model: lstm", "train.model: model 'lstm' takes text only", "mlp"),
    "shape": ("model: mlp", "model: fednnnn_cifar", "train.model: model 'fednnnn_cifar' needs", ""),
    "device": (
        "device: cpu",
        "device: cuda",
        "train.device: device 'cuda': this machine has no",
        "cpu",
    ),
    "layer": (
        "scaffold+fnr: {fnr: {p: 0.5}}",
        "scaffold+fnr: {recipe: fednlr, fednlr: {mu: no=2}}",
        "recipes.scaffold+fnr: fednlr: mu = 'no=2' names 'no'",
        "allowed: fc1, fc2",
    ),
    "noise": (
        "alpha: 0.5",
        "alpha: 0.5, rotation: {degrees: [45]}",
        "scenarios.skewed.rotation.degrees",
        "90",
    ),
    "tf32": ("lr: 0.1", "lr: 0.1, precision: tf32", "recipes.fedavg: precision = tf32", "float32"),
}


def refused(folder: Path, old: str, new: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines of `noniid check` about PARAMS with a piece replaced."""
    assert old in PARAMS
    (folder / "params.yaml").write_text(PARAMS.replace(old, new))
    assert main(["check", "--root", str(folder)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and [path.name for path in folder.iterdir()] == ["params.yaml"], (
        "nothing is written"
    )
    return said.err.splitlines()


@pytest.mark.parametrize(("old", "new", "said", "part"), CASES.values(), ids=CASES)
def test_what_the_data_do_not_allow_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    old: str,
    new: str,
    said: str,
    part: str,
) -> None:
    monkeypatch.setattr(device, "gpus", Gpus)
    lines = refused(tmp_path, old, new, capsys)
    assert lines[0].startswith(f"error: params.yaml: {said}") and part in lines[0]
    assert len({line.partition(": recipes.")[0] for line in lines}) == 1


def test_all_mistakes_are_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A scenario and the model; seeds with the same mistake share a line."""
    lines = refused(
        tmp_path,
        PARAMS,
        PARAMS.replace("model: mlp", "model: lstm")
        .replace("clients: 4", "clients: 3000")
        .replace("seeds: [0]", "seeds: [0, 1]"),
        capsys,
    )
    assert (
        len(lines) == 2
        and "scenarios.skewed.clients = 3000" in lines[0]
        and "train.model" in lines[1]
    )


def test_a_deployment_is_tried_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four clients have classes of their own; three silos can't."""
    classes = "partition: by_classes, clients: 4, classes: [[0, 1], [2, 3], [4, 5], [6, 7]]"
    text = PARAMS.replace("silos: 2", "silos: 3")
    (line,) = refused(tmp_path, PARAMS, text.replace(DEALT, classes), capsys)
    assert line.startswith("error: params.yaml: deploy.silos = 3: classes = ")


def test_a_validation_split_without_a_metric_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """R^2 of one sample; the samples of the trial have nothing to do with it."""
    x = np.random.default_rng(0).normal(size=(60, 2))
    np.savez(tmp_path / "train.npz", x=x, y=x[:, 0])
    keys = ("train.loss=mse", "scenario.partition=iid", "scenario.clients=2")
    given = ["init", str(tmp_path / "one"), "--data", str(tmp_path)]
    given += [word for key in keys for word in ("--set", key)]
    assert main([*given, "--set", "data.validation=0.02"]) == 2
    line = "data.validation: R² of the 1 validation samples is not defined; allowed: "
    assert line in capsys.readouterr().err
    assert main([*given, "--set", "data.validation=0.2"]) == 0


OWN = """\
from fedml_noniid.engines.callbacks import Callback
from fedml_noniid.rates import Rate

class Keeps(Callback):
    def on_start(self, run):
        self.seen = (1, 2)

class Rising(Rate):
    def decayed(self, p, rounds):
        return self.start * (1 + (p == 2))
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "device: cpu",
            "device: cpu, callbacks: {ways_of_mine:Keeps: {}}",
            "callback Keeps: seen = (1, 2) can't be kept in a",
        ),
        (
            "lr: 0.1",
            "lr: {start: 0.1, decay: ways_of_mine:Rising}",
            "lr: Rising gives 0.2 in round 3; allowed: above 0, at most 0.1",
        ),
    ],
)
def test_own_callbacks_and_schedules_are_tried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, words: str
) -> None:
    """Whether a checkpoint can keep what a callback has; the step size of each round."""
    (tmp_path / "ways_of_mine.py").write_text(OWN)
    (tmp_path / "params.yaml").write_text(PARAMS.replace(old, new))
    assert main(["check", "--root", str(tmp_path)]) == 2
    assert words in capsys.readouterr().err


def test_nothing_is_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)  # its import takes seconds
    (tmp_path / "params.yaml").write_text(PARAMS.replace("name: digits", "name: mnist"))
    assert main(["check", "--root", str(tmp_path)]) == 0
    assert (
        "would be downloaded by stage prepare; the data were not checked" in capsys.readouterr().out
    )


def test_prepared_data_are_read_only_if_they_are_those_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """dvc.lock says what they were made of."""
    (tmp_path / "params.yaml").write_text(PARAMS)
    run_stages(tmp_path, ("plan", "prepare"))
    md5 = hashlib.md5((tmp_path / "plan" / "prepare.json").read_bytes()).hexdigest()
    (tmp_path / "dvc.lock").write_text(
        f"stages: {{prepare: {{deps: [{{path: plan/prepare.json, md5: {md5}}}]}}}}\n"
    )
    read: list[str] = []
    load = datasets.load
    monkeypatch.setattr(datasets, "load", lambda *a, **k: read.append("files") or load(*a, **k))
    monkeypatch.setattr(
        Dataset, "read", lambda path: read.append("prepared") or load("digits", tmp_path)
    )
    place = Workspace.from_environment(tmp_path, {})
    fits.checked(place)
    (tmp_path / "params.yaml").write_text(
        PARAMS.replace("name: digits,", "name: digits, samples: 500,")
    )
    fits.checked(place)
    assert read == ["prepared", "files"]
    assert plan.content({"a": "b"}) == b'{\n  "a": "b"\n}\n'


@pytest.mark.parametrize(
    ("params", "stages", "said"),
    [
        (PARAMS, "{train: {}}", "deploy is set, but dvc.yaml has no stage deploy"),
        (
            PARAMS[: PARAMS.index("deploy:")],
            "{deploy: {}}",
            "deploy is missing, but dvc.yaml has the stage deploy",
        ),
        (PARAMS[: PARAMS.index("deploy:")], "{train: {}}", ""),
        (PARAMS, "{deploy: {}}", ""),
    ],
)
def test_section_and_stage_of_a_deployment_go_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], params: str, stages: str, said: str
) -> None:
    (tmp_path / "params.yaml").write_text(params)
    (tmp_path / "dvc.yaml").write_text(f"stages: {stages}\n")
    assert main(["check", "--root", str(tmp_path)]) == (2 if said else 0)
    assert said in capsys.readouterr().err
    assert (config.load(tmp_path).deploy is None) is ("deploy:" not in params)


def test_a_missing_stage_hides_no_other_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "params.yaml").write_text(PARAMS.replace("public: 50", "public: 5000"))
    (tmp_path / "dvc.yaml").write_text("stages: {train: {}}\n")
    assert main(["check", "--root", str(tmp_path)]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "deploy is set, but dvc.yaml has no stage deploy" in first
    assert "data.public = 5000 is refused" in second


def test_the_paths_of_the_settings_start_at_their_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of first values of this name in another folder is not taken."""
    here, study = tmp_path / "here", tmp_path / "study"
    here.mkdir(), study.mkdir()
    save_file({"fc9.weight": torch.zeros(1)}, here / "first.safetensors")
    monkeypatch.chdir(here)
    init = ("model: mlp", "model: mlp, init: first.safetensors")
    (line,) = refused(study, *init, capsys)
    assert line.startswith("error: params.yaml: train.init: first.safetensors can't be read")
    save_file({"fc1.bias": torch.zeros(64)}, study / "first.safetensors")
    assert main(["check", "--root", "../study"]) == 0
    assert Path.cwd() == here
