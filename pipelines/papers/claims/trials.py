"""What a tuned study tried, for the page and for claims-trials.csv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedml_noniid.pipelines.experiment.results import record
from fedml_noniid.pipelines.papers.studies import Study

FILE = "tuned.json"  # beside the study's runs
TRIALS = "claims-trials.csv"
PER_TRIAL = ["paper", "study", "recipe", "values", "seeds", "validation_accuracy", "chosen"]
Tried = Mapping[str, Sequence[Sequence[Any]]]  # recipe -> (values, validation accuracy or None, seeds), the best first


def read(root: Path, study: Study) -> Tried:
    """The trials of a study that is tuned; empty before."""
    path = root / study.folder / FILE
    return record(path) if path.is_file() else {}


def words(found: Tried) -> str:
    """What was chosen: `tuned on the validation split, 6 trials each: fedavg lr 0.1; fednnnn lr 0.05`."""
    if not found:
        return ""
    most = max(map(len, found.values()))
    chosen = "; ".join(f"{recipe} {trials[0][0]}" for recipe, trials in found.items())
    return f"tuned on the validation split, {most} trials for each method: {chosen}. "


def lines(paper: str, study: str, found: Tried) -> list[list[object]]:
    """The lines of a study in claims-trials.csv."""
    return [
        [paper, study, recipe, values, seeds, accuracy, "yes" if place == 0 else ""]
        for recipe, trials in found.items()
        for place, (values, accuracy, seeds) in enumerate(trials)
    ]
