"""Schedules and callbacks of params.yaml: from the file to the report, killed and gone on, also
with a user's code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.pipelines.experiment.provenance import of_training
from tests.pipelines.small import PARAMS

OWN = """\
from dataclasses import dataclass

from torch import nn

from fedml_noniid import Callback, Rate


class Net(nn.Sequential):
    def __init__(self, n_classes, hidden=9):
        first, drop = nn.Linear(64, hidden), nn.Dropout(0.2)
        super().__init__(nn.Flatten(), first, drop, nn.ReLU(), nn.Linear(hidden, n_classes))


@dataclass
class Counts(Callback):
    patience: int = 3
    rounds: int = 0

    def measure(self, end):
        params, _ = end.model
        return \
{"counted": self.rounds, "length": sum(float((p**2).sum()) for p in params.values()) ** 0.5}

    def stop(self, rows):
        return "counted" if self.rounds + 1 == self.patience else ""

    def on_round(self, run, row):
        self.rounds += 1


class Linear(Rate):
    def decayed(self, p, rounds):
        return self.start * (1 - p / rounds)
"""
SETTINGS = (
    PARAMS.replace("recipe_names: [fedavg, scaffold+fnr]", "recipe_names: [scaffold]")
    .replace("scaffold+fnr: {fnr: {p: 0.5}}", "scaffold: {}")
    .replace("rounds: 3", "rounds: 6")
    .replace("model: mlp", "model: OWN:Net, model_options: {hidden: 8}")
    .replace(
        "lr: 0.1,",
        (
            "lr: {start: 0.2, decay: OWN.Linear, warm_up: 1},\n  callbacks: {OWN.Counts: "
            "{patience: "
            "4}},"
        ),
    )
    .replace("deploy: {recipe: fedavg", "deploy: {recipe: scaffold")
)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A study whose module has a name that no other test imports."""
    name = f"mine_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    (tmp_path / "params.yaml").write_text(SETTINGS.replace("OWN", name))
    return tmp_path


def test_an_edit_of_the_users_file_trains_again(study: Path) -> None:
    """A comment counts too: what the file imports is not known."""
    (file,) = study.glob("mine_*.py")
    prints = []
    for text in (OWN, f"{OWN}\n# new\n"):
        file.write_text(text)
        sys.modules.pop(file.stem, None)
        settings = config.load(study)
        prints.append(of_training(settings, settings.units()[0]))
    assert prints[0] != prints[1]
    assert settings.own_extras, "`noniid run` asks the stage plan each time"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("", "", "OWN.py, line 2: NameError: name 'z' is not defined"),
        (
            "OWN.Linear",
            "OWN.Linar",
            "train.lr: decay 'OWN.Linar' can't be imported, AttributeError",
        ),
        (
            "OWN:Net",
            "OWN:Nett",
            "train.model: model 'OWN:Nett' can't be imported, AttributeError",
        ),
        ("hidden: 8", "hiden: 8", "train.model_options.hiden is unknown (did you mean 'hidden'?)"),
        ("OWN.Linear", "cosin", "train.lr: decay 'cosin' is unknown (did you mean 'cosine'?)"),
        ("start: 0.2", "start: 0", "train.lr.start = 0 is refused"),
        (
            "OWN.Counts",
            "OWN.Count",
            "train.callbacks: callback 'OWN.Count' can't be imported, AttributeError",
        ),
        (
            "patience: 4",
            "patienc: 4",
            "OWN.Counts.patienc is unknown (did you mean 'patience'?); allowed: patience, rounds",
        ),
        (
            "{OWN.Counts: {patience: 4}}",
            "{early_stop: {patience: 0}}",
            "early_stop.patience = 0 is",
        ),
        (
            "{OWN.Counts: {patience: 4}}",
            "{early_stop: 3}",
            "train.callbacks.early_stop = 3 is refused",
        ),
        (
            "{OWN.Counts: {patience: 4}}",
            "[early_stop]",
            "train.callbacks = ['early_stop'] is refused",
        ),
    ],
)
def test_mistakes_are_lines_that_name_the_key(study: Path, old: str, new: str, words: str) -> None:
    name = next(study.glob("mine_*.py")).stem
    path = study / "params.yaml"
    text = path.read_text()
    path.write_text(text.replace(old.replace("OWN", name), new.replace("OWN", name)))
    if not old:
        (study / f"{name}.py").write_text("x = 1\ny = z\n")
    with pytest.raises(UserError) as error:
        config.load(study)
    sys.modules.pop(name, None)
    (*_, line) = str(error.value).splitlines() if not old else [str(error.value)]
    assert words.replace("OWN", name) in line and "\n" not in line
