"""The results of a paper's studies at one size, by address: study, scenario, recipe."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from pipelines import results
from pipelines.results import Result
from pipelines.studies import DIVERGED, SKIPPED, Study, of_paper
from pipelines.summary import Spread, spread
from pipelines.targets import marks
from pipelines.targets.marks import Group, Place
from plugins.core.errors import UserError
from plugins.data.checks import known

LAST = re.compile(r"last(\d+)")


class Measured:
    """What has been run so far. It notes what is read, so that a report can say what a reader has to know of that."""

    def __init__(self, paper: str, size: str, root: Path) -> None:
        self.paper, self.size, self.root = paper, size, root
        self.studies: dict[str, Study] = of_paper(paper, size, root)
        self.used: dict[Place, Group] = {}  # what has been read since `forget`
        self._read = cache(self._results)

    def runs(self, address: Mapping[str, Any]) -> list[Result]:
        """The finished runs of {study, scenario, recipe}, by seed."""
        return list(self.group(address).runs)

    def of_study(self, study: str) -> list[Result]:
        """All its finished runs, whether they are planned now or not."""
        return self._read(study)

    def forget(self) -> None:
        """Begins anew to note what is read."""
        self.used = {}

    def mark(self, address: Mapping[str, Any]) -> str:
        """What stands behind a number of {study, scenario, recipe}: ` LEAK`, ` [1]` for notes, diverged seeds."""
        return marks.mark(self.group(address), self.used)

    def compared(self, address: Mapping[str, Any]) -> bool:
        """Whether a sentence may compare its mean: no run has seen the test set, and no seed diverged."""
        group = self.group(address)
        return not group.leaks and not group.diverged

    def remarks(self) -> tuple[str, ...]:
        """What the marks mean, for all that has been read."""
        return tuple(marks.remarks(self.used))

    def is_wanted(self, address: Mapping[str, Any]) -> bool:
        """Whether this size runs {study, scenario, recipe} at all."""
        content = self.studies[address["study"]].content
        return address["scenario"] in content["scenario_names"] and address["recipe"] in content["recipe_names"]

    def value(self, address: Mapping[str, Any], statistic: str) -> Spread | None:
        """Mean and spread over seeds of a statistic of the runs at `address`; None if there are none."""
        values = [number(run, statistic) for run in self.runs(address)]
        return spread(value for value in values if value is not None)

    def gain(self, address: Mapping[str, Any], base: Mapping[str, Any], statistic: str) -> Spread | None:
        """Mean and spread over seeds of the difference to the run at `base` with the same seed; None if there is none.

        It is what a method adds to another one: the partition and the first weights are the same, so that their spread
        over seeds drops out. None too if a seed of either diverged: the others would flatter it.
        """
        if self.diverged(address) or self.diverged(base):
            return None
        ours, theirs = ({run.seed: number(run, statistic) for run in self.runs(at)} for at in (address, base))
        pairs = ((value, theirs.get(seed)) for seed, value in ours.items())
        return spread(value - other for value, other in pairs if value is not None and other is not None)

    def skipped(self, study: str) -> str:
        """Why a study was not run, or nothing: its data are not there."""
        path = self.folder(study) / SKIPPED
        return path.read_text().strip() if path.is_file() else ""

    def diverged(self, address: Mapping[str, Any]) -> tuple[int, ...]:
        """The seeds on which {study, scenario, recipe} has ended without a model, its loss being infinite."""
        return self.group(address).diverged

    def ends(self, study: str) -> dict[str, str]:
        """The study's items that have ended without a model, and why."""
        path = self.folder(study) / DIVERGED
        return results.record(path) if path.is_file() else {}

    def recorded(self, run: Result, study: str) -> dict[str, Tensor]:
        """The other quantities that a run recorded, "<component>/<quantity>" [T, ...]."""
        found: dict[str, Tensor] = load_file(self.folder(study) / "runs" / run.key / "recorded.safetensors")
        return found

    def folder(self, study: str) -> Path:
        """The results of a study."""
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

    def _results(self, study: str) -> list[Result]:
        return results.read(self.folder(study))


def number(run: Result, statistic: str) -> float | None:
    """A statistic of one run: final, best, lastN (mean of the last N evaluated rounds), or a key of metrics.json."""
    accuracies = run.column("test_accuracy")
    last = LAST.fullmatch(statistic)
    if last:
        return statistics.fmean(accuracies[-int(last[1]) :])
    if statistic == "final":
        return accuracies[-1]
    if statistic == "best":
        return max(accuracies)
    value = run.evaluation.get(statistic)
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise UserError(f"statistic {statistic!r} is no number; allowed: final, best, lastN, a number of metrics.json")
    return float(value) if math.isfinite(value) else None


def series(runs: Sequence[Result], column: str) -> tuple[list[int], np.ndarray[Any, np.dtype[np.float64]]]:
    """(rounds, values [seeds, rounds]) of a column of rounds.csv, over the rounds that all runs measured."""
    tables = [{int(r["round"]): r[column] for r in run.rows if math.isfinite(r.get(column, math.nan))} for run in runs]
    rounds = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    return rounds, np.array([[table[t] for t in rounds] for table in tables]).reshape(len(tables), len(rounds))
