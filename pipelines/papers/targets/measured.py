"""The results of a paper's studies at one size, by address: study, scenario, recipe."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from fedml_noniid.pipelines.experiment import results
from fedml_noniid.pipelines.experiment.counts import kappa
from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.papers.studies import DIVERGED, SKIPPED, Study, of_paper
from fedml_noniid.pipelines.papers.targets import marks
from fedml_noniid.pipelines.papers.targets.marks import Group, Place
from fedml_noniid.pipelines.reporting.summary import Spread, spread
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.checks import known
from fedml_noniid.plugins.data.types import Ints

LAST = re.compile(r"last(\d+)")
ABOUT_CLIENTS = (
    "client",
    "samples",
    "entropy",
    "noise",
    "label_noise",
    "rotation",
    "drift",
)  # columns of clients.csv before the classes
# Statistics that depend on the machine, from the final accuracy and the seconds of each round.
OF_TIME: Mapping[str, Callable[[float, Sequence[float]], float]] = {
    "seconds": lambda _, seconds: sum(seconds),
    "seconds_per_round": lambda _, seconds: statistics.fmean(seconds),
    "kappa": lambda accuracy, seconds: kappa(accuracy, sum(seconds)),
}
ALLOWED = (
    f"final, best, lastN, {', '.join(OF_TIME)}, a number of metrics.json, a column of rounds.csv"
)


class Held(NamedTuple):
    """The samples of each client in a partition."""

    counts: Ints  # [N, C], samples
    classes: tuple[str, ...]


class Measured:
    """The finished runs of a paper.

    It notes which runs are read, so that a report can add remarks on them.
    """

    def __init__(self, paper: str, size: str, root: Path) -> None:
        self.paper, self.size, self.root = paper, size, root
        self.studies: dict[str, Study] = of_paper(paper, size, root)
        self.used: dict[Place, Group] = {}  # the groups read since `forget`
        self._read = cache(self._results)

    def runs(self, address: Mapping[str, Any]) -> list[ItemResult]:
        """The finished runs of {study, scenario, recipe}, by seed."""
        return list(self.group(address).runs)

    def of_study(self, study: str) -> list[ItemResult]:
        """All finished runs of a study, including runs that are no longer planned."""
        return self._read(study)

    def forget(self) -> None:
        """Empties the note of what is read."""
        self.used = {}

    def mark(self, address: Mapping[str, Any]) -> str:
        """The text behind a number of {study, scenario, recipe}: ` LEAK`, ` [1]` for notes,
        diverged seeds."""
        return marks.mark(self.group(address), self.used)

    def compared(self, address: Mapping[str, Any]) -> bool:
        """Whether a sentence may compare its mean: no run has seen the test set, and no seed
        diverged."""
        group = self.group(address)
        return not group.leaks and not group.diverged

    def remarks(self) -> tuple[str, ...]:
        """The meaning of the marks, for all runs that were read."""
        return tuple(marks.remarks(self.used))

    def is_wanted(self, address: Mapping[str, Any]) -> bool:
        """Whether this size runs {study, scenario, recipe} at all."""
        content = self.studies[address["study"]].content
        return (
            address["scenario"] in content["scenario_names"]
            and address["recipe"] in content["recipe_names"]
        )

    def found(self, address: Mapping[str, Any], name: str, missing: list[str]) -> list[ItemResult]:
        """The finished runs of {study, scenario, recipe}.

        If planned runs are missing, `missing` gets `name`.
        """
        if not self.is_wanted(address):
            return []
        runs = self.runs(address)
        if not runs and not self.diverged(address):
            missing.append(name)
        return runs

    def value(self, address: Mapping[str, Any], statistic: str, scale: float = 1) -> Spread | None:
        """Mean and spread over seeds of a statistic of the runs at `address`; None without a
        value."""
        return spread(self.by_seed(address, statistic, scale).values())

    def gain(
        self, address: Mapping[str, Any], base: Mapping[str, Any], statistic: str, scale: float = 1
    ) -> Spread | None:
        """Mean and spread over seeds of the difference to the run at `base` with the same seed;
        None without a value.

        It is the gain of a method over another one. Both have the same partition and first weights,
        so the spread of those over seeds drops out. Also None if a seed of either diverged: the
        other seeds' mean would be too high.
        """
        if self.diverged(address) or self.diverged(base):
            return None
        ours, theirs = (self.by_seed(at, statistic, scale) for at in (address, base))
        return spread(value - theirs[seed] for seed, value in ours.items() if seed in theirs)

    def by_seed(
        self, address: Mapping[str, Any], statistic: str, scale: float = 1
    ) -> dict[int, float]:
        """A statistic of the runs at `address` by seed. Runs without the statistic are left out."""
        values = {run.seed: number(run, statistic) for run in self.runs(address)}
        return {seed: scale * value for seed, value in values.items() if value is not None}

    def skipped(self, study: str) -> str:
        """The reason why a study was not run (its data are missing), or ""."""
        path = self.folder(study) / SKIPPED
        return path.read_text().strip() if path.is_file() else ""

    def diverged(self, address: Mapping[str, Any]) -> tuple[int, ...]:
        """The seeds on which {study, scenario, recipe} ended without a model because the loss was
        not finite."""
        return self.group(address).diverged

    def ends(self, study: str) -> dict[str, str]:
        """The study's items that ended without a model -> the reason."""
        path = self.folder(study) / DIVERGED
        return results.record(path) if path.is_file() else {}

    def recorded(self, run: ItemResult, study: str) -> dict[str, Tensor]:
        """The other quantities that a run recorded, "<component>/<quantity>" [T, ...]."""
        found: dict[str, Tensor] = load_file(
            self.folder(study) / "runs" / run.key / "recorded.safetensors"
        )
        return found

    def held(self, study: str, scenario: str, seed: int) -> Held | None:
        """The samples of each client in a partition of a study.

        None if the partition is missing.
        """
        path = self.folder(study) / "partitions" / f"{scenario}-{seed}" / "clients.csv"
        if not path.is_file():
            return None
        rows = results.table(path)
        classes = tuple(name for name in rows[0] if name not in ABOUT_CLIENTS)
        return Held(np.array([[int(row[name]) for name in classes] for row in rows]), classes)

    def folder(self, study: str) -> Path:
        """The folder with the results of a study."""
        return self.root / self.studies[study].folder

    def group(self, address: Mapping[str, Any]) -> Group:
        """The finished runs of {study, scenario, recipe}, by seed, and the seeds that diverged."""
        study = known("study", address.get("study"), self.studies)
        place = (study, str(address.get("scenario")), str(address.get("recipe")))
        if place not in self.used:
            runs = (run for run in self._read(study) if (run.scenario, run.recipe) == place[1:])
            ends = (item.rsplit("-", 1) for item in self.ends(study))
            seeds = sorted(int(seed) for item, seed in ends if item == f"{place[1]}-{place[2]}")
            self.used[place] = Group(tuple(sorted(runs, key=lambda run: run.seed)), tuple(seeds))
        return self.used[place]

    def _results(self, study: str) -> list[ItemResult]:
        return results.read(self.folder(study), self.root)


def number(run: ItemResult, statistic: str) -> float | None:
    """A statistic of one run. None if the run lacks it.

    final, best, lastN (mean of the last N evaluated rounds); seconds, seconds_per_round, kappa; a
    key of metrics.json; the last value of a column of rounds.csv.
    """
    accuracies = run.column("test_accuracy")
    last = LAST.fullmatch(statistic)
    if last:
        return statistics.fmean(accuracies[-int(last[1]) :])
    if statistic == "final":
        return accuracies[-1]
    if statistic == "best":
        return max(accuracies)
    if statistic in OF_TIME:
        return OF_TIME[statistic](accuracies[-1], run.seconds) if run.seconds else None
    value = run.evaluation.get(statistic, next(reversed(run.column(statistic)), None))
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise UserError(f"statistic {statistic!r} is no number; allowed: {ALLOWED}")
    return float(value) if math.isfinite(value) else None


def series(
    runs: Sequence[ItemResult], column: str
) -> tuple[list[int], np.ndarray[Any, np.dtype[np.float64]]]:
    """(rounds, values [seeds, rounds]) of a column of rounds.csv, over the rounds that all runs
    measured."""
    tables = [
        {int(r["round"]): r[column] for r in run.rows if math.isfinite(r.get(column, math.nan))}
        for run in runs
    ]
    rounds = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    return rounds, np.array([[table[t] for t in rounds] for table in tables]).reshape(
        len(tables), len(rounds)
    )
