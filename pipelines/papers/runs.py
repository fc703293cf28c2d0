"""Reads the finished runs of a paper's studies, by address: study, scenario, recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from fedml_noniid.pipelines.experiment import results
from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.papers import marks
from fedml_noniid.pipelines.papers.marks import Address, Group
from fedml_noniid.pipelines.papers.studies import DIVERGED, SKIPPED, Study, of_paper
from fedml_noniid.plugins.data.checks import known
from fedml_noniid.plugins.data.types import Ints

# Columns of clients.csv before the classes.
ABOUT_CLIENTS = ("client", "samples", "entropy", "noise", "label_noise", "rotation", "drift")


class ClientSamples(NamedTuple):
    """How many samples of each class each client has."""

    counts: Ints  # [N, C], samples
    classes: tuple[str, ...]


class Measured:
    """The finished runs of a paper.

    It notes which runs are read, so that a report can add remarks on them.
    """

    def __init__(
        self, paper: str, size: str, root: Path, studies: Mapping[str, Study] | None = None
    ) -> None:
        self.paper, self.size, self.root = paper, size, root
        self.studies = of_paper(paper, size, root) if studies is None else studies
        self.used: dict[Address, Group] = {}  # the groups read since `forget`
        self.of_study = cache(self._of_study)

    def _of_study(self, study: str) -> list[ItemResult]:
        """All finished runs of a study, including runs that are no longer planned."""
        return results.read(self.folder(study), self.root)

    def forget(self) -> None:
        """Empties the note of what is read."""
        self.used = {}

    def group(self, address: Mapping[str, Any]) -> Group:
        """The finished runs of {study, scenario, recipe}, by seed, and the seeds that diverged."""
        study = known("study", address.get("study"), self.studies)
        place = Address(study, str(address.get("scenario")), str(address.get("recipe")))
        if place not in self.used:
            runs = [run for run in self.of_study(study) if (run.scenario, run.recipe) == place[1:]]
            items = (item.rsplit("-", 1) for item in self.diverged_items(study))
            seeds = (int(seed) for item, seed in items if item == f"{place[1]}-{place[2]}")
            by_seed = sorted(runs, key=lambda run: run.seed)
            self.used[place] = Group(tuple(by_seed), tuple(sorted(seeds)))
        return self.used[place]

    def mark(self, address: Mapping[str, Any]) -> str:
        """The text behind a number of {study, scenario, recipe}: ` LEAK`, ` [1]` for notes,
        diverged seeds."""
        return marks.mark(self.group(address), self.used)

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

    def found(
        self, address: Mapping[str, Any], name: str, missing: list[str]
    ) -> tuple[ItemResult, ...]:
        """The finished runs of {study, scenario, recipe}, by seed.

        If planned runs are missing, `missing` gets `name`.
        """
        if not self.is_wanted(address):
            return ()
        group = self.group(address)
        if not group.runs and not group.diverged:
            missing.append(name)
        return group.runs

    def skipped(self, study: str) -> str:
        """The reason why a study was not run (its data are missing), or ""."""
        path = self.folder(study) / SKIPPED
        return path.read_text().strip() if path.is_file() else ""

    def diverged_items(self, study: str) -> dict[str, str]:
        """The study's items that ended without a model because the loss was not finite -> why."""
        path = self.folder(study) / DIVERGED
        return results.record(path) if path.is_file() else {}

    def recorded(self, run: ItemResult, study: str) -> dict[str, Tensor]:
        """The other quantities that a run recorded, "<component>/<quantity>" [T, ...]."""
        found: dict[str, Tensor] = load_file(
            self.folder(study) / "runs" / run.key / "recorded.safetensors"
        )
        return found

    def client_samples(self, study: str, scenario: str, seed: int) -> ClientSamples | None:
        """The samples of each client in a partition of a study; None if it is missing."""
        path = self.folder(study) / "partitions" / f"{scenario}-{seed}" / "clients.csv"
        if not path.is_file():
            return None
        rows = results.table(path)
        classes = tuple(name for name in rows[0] if name not in ABOUT_CLIENTS)
        counts = np.array([[int(row[name]) for name in classes] for row in rows])
        return ClientSamples(counts, classes)

    def folder(self, study: str) -> Path:
        """The folder with the results of a study."""
        return self.root / self.studies[study].folder


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
    values = np.array([[table[t] for t in rounds] for table in tables])
    return rounds, values.reshape(len(tables), len(rounds))
