"""What a tuned study tried, for the page and for claims-trials.csv."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedml_noniid.pipelines.experiment.results import record
from fedml_noniid.pipelines.papers.studies import Study
from fedml_noniid.pipelines.reporting.text import markdown

FILE = "tuned.json"  # beside the study's runs
TRIALS = "claims-trials.csv"
PER_TRIAL = ["paper", "study", "recipe", "values", "seeds", "validation_accuracy", "chosen"]
LR = re.compile(r"\blr ([\d.e-]+)")
SAYS = """\
The best of equally many trials for each method, on the validation split. claims-trials.csv has \
all trials. A step size
at the end of the grid, its smallest or its largest, may not be the best: nobody tried beyond it."""
Tried = Mapping[
    str, Sequence[Sequence[Any]]
]  # recipe -> (values, validation accuracy or None, seeds), the best first


def read(root: Path, study: Study) -> Tried:
    """The trials of a study that is tuned; empty before."""
    path = root / study.folder / FILE
    return record(path) if path.is_file() else {}


def words(found: Tried) -> str:
    """What was chosen: `tuned on the validation split, 6 trials each: fedavg lr 0.1; fednnnn lr
    0.05`."""
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


def section(found: Sequence[Sequence[object]]) -> str:
    """The table of what was chosen; empty without trials. `found`: lines of claims-trials.csv."""
    rows = [["paper", "study", "method", "chosen", "trials", "step size"]]
    for paper, study in dict.fromkeys((str(line[0]), str(line[1])) for line in found):
        own = [line for line in found if (line[0], line[1]) == (paper, study)]
        grid = {float(rate) for line in own for rate in LR.findall(str(line[3]))}
        for line in own:
            if line[-1] == "yes":
                tried = sum(other[2] == line[2] for other in own)
                rows.append(
                    [
                        paper,
                        study,
                        str(line[2]),
                        str(line[3]),
                        str(tried),
                        _place(str(line[3]), grid),
                    ]
                )
    return f"## Tuned values\n\n{SAYS}\n\n{markdown(rows)}" if len(rows) > 1 else ""


def _place(values: str, grid: set[float]) -> str:
    """Where the chosen step size lies in the study's grid."""
    rate = LR.search(values)
    if rate is None or len(grid) < 2:
        return "not tuned"
    chosen = float(rate[1])
    return (
        "the largest"
        if chosen == max(grid)
        else "the smallest"
        if chosen == min(grid)
        else "within"
    )
