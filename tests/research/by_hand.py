"""Results made by hand: a paper of one's own in an empty folder, and runs with the numbers that a
test needs."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from fedml_noniid.pipelines.experiment import cache
from research.report import build
from research.runs import Measured
from research.studies import DIVERGED, PAPER_FILES, RESULTS
from research.targets import Built, Target

PAPER, SIZE = "ccn", "smoke"
PARAMS = """\
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


def paper(root: Path, targets: str = "{}", reported: str = "{}", params: str = PARAMS) -> Path:
    """Writes the three files of a paper."""
    folder = root / PAPER_FILES / PAPER
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("params", params), ("targets", targets), ("reported", reported)):
        (folder / f"{name}.yaml").write_text(text)
    return root


def folder(root: Path, study: str = "one") -> Path:
    """The folder of a study."""
    return root / RESULTS / PAPER / SIZE / "studies" / study


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
    columns: Mapping[str, Sequence[float]] | None = None,
    seconds: float = 0.5,
    sha: str = "0",
) -> None:
    """Writes a finished run: its accuracy after each round (None: not measured), and what else it
    has."""
    key, n = f"{scenario}-{recipe}-{seed}", len(accuracies)
    runs = folder(root, study) / "runs" / key
    runs.mkdir(parents=True, exist_ok=True)
    by_column = {
        "round": range(1, n + 1),
        "test_accuracy": accuracies,
        "bytes_up": [10] * n,
        "bytes_down": [20] * n,
        **(columns or {}),
    }
    rows = [["" if x is None else x for x in row] for row in zip(*by_column.values(), strict=True)]
    text = "".join(",".join(map(str, row)) + "\n" for row in [list(by_column), *rows])
    (runs / "rounds.csv").write_text(text)
    fingerprint = hashlib.sha256(f"{study} {key}".encode()).hexdigest()
    made = cache.folder_of(root, fingerprint) / cache.MADE
    made.parent.mkdir(parents=True, exist_ok=True)
    made.write_text(json.dumps({"seconds": [seconds] * n}))
    about = {
        "scenario": scenario,
        "recipe": recipe,
        "composition": recipe,
        "seed": seed,
        "params": SETTINGS | {"train.rounds": n} | dict(params or {}),
        "notes": list(notes),
        "tags": {"fingerprint": fingerprint, **(tags or {})},
        "final": {},
        "rounds": n,
        "weights_sha256": sha,
    }
    (runs / "run.json").write_text(json.dumps(about))
    if recorded is not None:
        save_file(dict(recorded), runs / "recorded.safetensors")
    evaluation = folder(root, study) / "evaluation" / key
    if metrics is not None:
        evaluation.mkdir(parents=True, exist_ok=True)
        (evaluation / "metrics.json").write_text(json.dumps(metrics))


def clients(
    root: Path, scenario: str, seed: int, counts: Sequence[Sequence[int]], study: str = "one"
) -> None:
    """Writes the samples of classes cat, dog and owl that each client has."""
    place = folder(root, study) / "partitions" / f"{scenario}-{seed}"
    place.mkdir(parents=True, exist_ok=True)
    lines = [f"{k},{sum(of)},1.5,0.1,{','.join(map(str, of))}" for k, of in enumerate(counts)]
    head = "client,samples,entropy,noise,cat,dog,owl"
    (place / "clients.csv").write_text("\n".join([head, *lines]) + "\n")


def built(
    root: Path, kind: str, spec: Mapping[str, Any], of: str = PAPER, reported: Any = None
) -> Built:
    """A target of a kind of paper `of`, from the runs under `root`."""
    spec = {"kind": kind, "title": "title", "protocol": [], **spec}
    return build(Target("x", of, kind, "title", (), spec, reported), Measured(PAPER, SIZE, root))


def rows(built: Built) -> list[dict[str, str]]:
    """The lines of its CSV file."""
    return list(csv.DictReader(io.StringIO(built.files["csv"].decode())))


def is_picture(built: Built) -> bool:
    """Whether it has a PNG picture that is not large."""
    return built.files["png"].startswith(b"\x89PNG") and len(built.files["png"]) < 200_000


def finals(
    root: Path, scenario: str, values: Mapping[str, Sequence[float]], study: str = "one"
) -> None:
    """Runs of one scenario that end at these accuracies, by recipe: one per seed."""
    for recipe, ends in values.items():
        for seed, end in enumerate(ends):
            run(root, scenario, recipe, seed, [end / 2, end], study)


def diverged(root: Path, *keys: str, study: str = "one") -> None:
    """Items that have ended without a model."""
    place = folder(root, study)
    place.mkdir(parents=True, exist_ok=True)
    (place / DIVERGED).write_text(json.dumps(dict.fromkeys(keys, "round 3: not finite")))
