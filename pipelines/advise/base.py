"""The result base: one line per run of pipelines/advise/study.yaml, with the measures of its
scenario.

`base.csv` is docs/results/advice-base.csv: a link in a checkout, a copy in a wheel.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fedml_noniid.pipelines.advise.measures import MEASURES
from fedml_noniid.pipelines.experiment.results import table
from fedml_noniid.plugins.core.errors import UserError

FILE = Path(__file__).with_name("base.csv")
BASELINE = "fedavg"
REMAKE = "`noniid advise --make-base` writes the file"
TEXTS = ("data", "scenario", "method", "weights_sha256", "code")
COLUMNS = (*TEXTS[:3], "seed", *MEASURES, "accuracy", "fedavg_accuracy", *TEXTS[3:])


@dataclass(frozen=True)
class Row:
    """One run.

    Accuracies are fractions; a run that ended without a model has that of one class for all
    samples.
    """

    data: str
    scenario: str
    method: str
    seed: int
    measures: Mapping[str, float]  # of the scenario with this seed
    accuracy: float  # on the test set after the last round
    fedavg_accuracy: float  # of the run with the same seed
    weights_sha256: str  # empty for a run without a model
    code: str  # the commit of the code


@dataclass(frozen=True)
class Known:
    """One scenario of the base: its measures, and each method's gain over FedAvg in points, means
    over seeds."""

    data: str
    scenario: str
    measures: Mapping[str, float]
    gains: Mapping[str, float]

    @property
    def name(self) -> str:
        """`mnist dirichlet01`."""
        return f"{self.data} {self.scenario}"


def as_lines(rows: Iterable[Row]) -> list[list[object]]:
    """The lines of the file, its header first."""
    cells = [{**asdict(row), **row.measures} for row in rows]
    return [list(COLUMNS), *([cell[column] for column in COLUMNS] for cell in cells)]


def read(path: Path = FILE) -> list[Row]:
    """The rows of the file. UserError if it is missing or damaged."""
    if not path.is_file():
        raise UserError(f"{path}: is missing; {REMAKE}")
    return [_row(path, number, cells) for number, cells in enumerate(table(path), start=2)]


def known(rows: Sequence[Row]) -> list[Known]:
    """The scenarios of the base, in its order. UserError if a method has no run on a scenario."""
    places: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        places.setdefault((row.data, row.scenario), []).append(row)
    methods = list(dict.fromkeys(row.method for row in rows))
    return [_known(data, scenario, own, methods) for (data, scenario), own in places.items()]


def _known(data: str, scenario: str, rows: Sequence[Row], methods: Sequence[str]) -> Known:
    gains = {}
    for method in methods:
        found = [100 * (row.accuracy - row.fedavg_accuracy) for row in rows if row.method == method]
        if not found:
            raise UserError(f"{FILE.name}: {data} {scenario} has no run of {method}; {REMAKE}")
        gains[method] = statistics.fmean(found)
    of_seeds = {row.seed: row.measures for row in rows}.values()
    return Known(
        data,
        scenario,
        {name: statistics.fmean(found[name] for found in of_seeds) for name in MEASURES},
        gains,
    )


def _row(path: Path, number: int, cells: Mapping[str, str]) -> Row:
    def value(column: str) -> float:
        try:
            found = float(cells[column])
        except (KeyError, ValueError):
            found = math.nan
        if not math.isfinite(found):
            said = repr(cells[column]) if column in cells else "missing"
            raise UserError(
                f"{path}: line {number}, column {column} is {said}, expected a number; {REMAKE}"
            )
        return found

    for column in TEXTS:
        if column not in cells:
            raise UserError(f"{path}: column {column} is missing; {REMAKE}")
    data, scenario, method, weights, code = (cells[column] for column in TEXTS)
    measures = {name: value(name) for name in MEASURES}
    accuracies = value("accuracy"), value("fedavg_accuracy")
    return Row(data, scenario, method, int(value("seed")), measures, *accuracies, weights, code)
