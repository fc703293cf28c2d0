"""Results made by hand: a paper of one's own in an empty folder, and runs with the numbers that a
test needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from fedml_noniid.pipelines.experiment import cache, check, config
from fedml_noniid.pipelines.papers.studies import DIVERGED, PAPER_FILES, RESULTS, Study
from fedml_noniid.pipelines.papers.targets import Target

PAPER, SIZE = "ccn", "smoke"
PARAMS = """\
study_names: [one]
studies:
  one:
    what: a study
    data: {name: digits, validation: 0, public: 0}
    scenarios:
      near: {partition: iid, clients: 2}
      far: {partition: iid, clients: 3}
      later: {partition: iid, clients: 4}
    recipes: {a: {recipe: fedavg}, b: {recipe: fedavg}, c: {recipe: fedavg}, d: {recipe: fedavg}}
    seeds: [0, 1, 2]
    train: {model: mlp, rounds: 2, epochs: 1, batch_size: 50, lr: 0.1}
    smoke: {scenario_names: [near, far]}
"""
# What such a run records of its settings.
SETTINGS = {
    "data.name": "digits",
    "data.validation": 0,
    "data.public": 0,
    "scenario.partition": "iid",
    "scenario.clients": 2,
    "scenario.participation": 1.0,
    "scenario.noise": None,
    "train.model": "mlp",
    "train.model_options": {},
    "train.rounds": 2,
    "train.epochs": 1,
    "train.batch_size": 50,
    "train.optimizer": "sgd",
    "train.lr": 0.1,
    "train.momentum": None,
    "train.augment": False,
    "train.device": "auto",
}


def sound(study: Study, folder: Path) -> config.Config:
    """A study's settings, which pass every check of an experiment."""
    (folder / config.FILE).write_text(study.yaml(folder))
    settings = config.load(folder)
    check.check(settings)
    assert settings.machine.checkpoint_every == 1, "rounds may take minutes"
    return settings


def paper(root: Path, targets: str = "{}", reported: str = "{}", params: str = PARAMS) -> Path:
    """Writes the three files of a paper."""
    folder = root / PAPER_FILES / PAPER
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("params", params), ("targets", targets), ("reported", reported)):
        (folder / f"{name}.yaml").write_text(text)
    return root


def run(
    root: Path,
    scenario: str,
    recipe: str,
    seed: int,
    accuracies: Sequence[float | None],
    study: str = "one",
    metrics: Mapping[str, object] | None = None,
    recorded: Mapping[str, Tensor] | None = None,
    *,
    params: Mapping[str, object] | None = None,
    tags: Mapping[str, str] | None = None,
    notes: Sequence[str] = (),
) -> None:
    """Writes a finished run: its accuracy after each round (None: not measured), and what else it
    has."""
    place = root / RESULTS / PAPER / SIZE / "studies" / study
    key = f"{scenario}-{recipe}-{seed}"
    folder = place / "runs" / key
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f"{t},{'' if value is None else value},10,20" for t, value in enumerate(accuracies, start=1)
    ]
    (folder / "rounds.csv").write_text(
        "\n".join(["round,test_accuracy,bytes_up,bytes_down", *lines]) + "\n"
    )
    about: dict[str, object] = {
        "scenario": scenario,
        "recipe": recipe,
        "composition": recipe,
        "seed": seed,
    }
    settings = SETTINGS | {"train.rounds": len(accuracies)} | dict(params or {})
    fingerprint = hashlib.sha256(f"{study} {key}".encode()).hexdigest()
    about |= {
        "params": settings,
        "tags": {"fingerprint": fingerprint, **(tags or {})},
        "notes": list(notes),
    }
    made = cache.folder_of(root, fingerprint) / cache.MADE
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_text(json.dumps({"seconds": [0.5] * len(accuracies)}))
    about |= {"final": {}, "weights_sha256": "0", "rounds": len(accuracies)}
    (folder / "run.json").write_text(json.dumps(about))
    if recorded is not None:
        save_file(dict(recorded), folder / "recorded.safetensors")
    if metrics is not None:
        path = place / "evaluation" / key / "metrics.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(metrics))


def finals(
    root: Path, scenario: str, values: Mapping[str, Sequence[float]], study: str = "one"
) -> None:
    """Runs of one scenario that end at these accuracies, by recipe: one per seed."""
    for recipe, ends in values.items():
        for seed, end in enumerate(ends):
            run(root, scenario, recipe, seed, [end / 2, end], study)


def diverged(root: Path, *keys: str, study: str = "one") -> None:
    """Items that have ended without a model."""
    place = root / RESULTS / PAPER / SIZE / "studies" / study
    place.mkdir(parents=True, exist_ok=True)
    (place / DIVERGED).write_text(json.dumps(dict.fromkeys(keys, "round 3: not finite")))


def assert_titles_as_reported(target: Target) -> None:
    """Of a table: its rows and columns are those of the paper's numbers, in their order, and no
    number is missing."""
    assert target.reported is not None
    assert list(target.spec["rows"]) == list(target.reported["rows"])
    assert list(target.spec["columns"]) == target.reported["columns"]
    assert all(
        len(row) == len(target.reported["columns"]) for row in target.reported["rows"].values()
    )
