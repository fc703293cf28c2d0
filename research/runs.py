"""Reads the finished runs of a paper's studies, by address: study, scenario, recipe.

It marks what a reader must know before comparing runs: leaks, notes on the data, diverged seeds.
All facts come from the runs' own files (run.json, diverged.json), so they hold for the runs as they
were made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.torch import load_file
from torch import Tensor

from fedml_noniid.data.checks import known
from fedml_noniid.data.dataset import LEAK
from fedml_noniid.data.types import Ints
from fedml_noniid.pipelines.experiment import results
from fedml_noniid.pipelines.experiment.results import ItemResult
from research.studies import DIVERGED, Study, of_paper

# Columns of clients.csv before the classes.
ABOUT_CLIENTS = ("client", "samples", "entropy", "noise", "label_noise", "rotation", "drift")


class ClientSamples(NamedTuple):
    """How many samples of each class each client has."""

    counts: Ints  # [N, C], samples
    classes: tuple[str, ...]


class Address(NamedTuple):
    """Where runs of several seeds lie."""

    study: str
    scenario: str
    recipe: str


class Group(NamedTuple):
    """The runs of one address, one per seed."""

    runs: tuple[ItemResult, ...]
    diverged: tuple[int, ...]  # seeds without a model

    @property
    def leaks(self) -> tuple[str, ...]:
        """The parts of the test set that training has seen, in words."""
        return tuple(dict.fromkeys(leak_of(run) for run in self.runs if leak_of(run)))

    @property
    def notes(self) -> tuple[tuple[str, ...], ...]:
        """The distinct notes of its runs."""
        return tuple(dict.fromkeys(notes_of(run) for run in self.runs if notes_of(run)))

    @property
    def is_compared(self) -> bool:
        """Whether its mean may be compared: no run has seen the test set, no seed diverged."""
        return not self.leaks and not self.diverged

    @property
    def divergence(self) -> str:
        """`1 of 3 seeds diverges`, "diverges" if no seed has ended, "" if no seed diverged."""
        diverged, n = len(self.diverged), len(self.diverged) + len(self.runs)
        if not diverged or not self.runs:
            return "diverges" if diverged else ""
        return f"{diverged} of {n} seeds diverge{'s' if diverged == 1 else ''}"

    def divergence_of(self, name: str) -> list[str]:
        """A sentence on a method with a diverged seed; none on another method."""
        colon = ":" if self.runs else ""
        return [f"{name}{colon} {self.divergence}."] if self.divergence else []


def leak_of(run: ItemResult) -> str:
    """The part of the test set that the data or the method showed to training; "" if none."""
    tag = run.tags.get("leak", "none")
    return "" if tag == "none" else tag


def notes_of(run: ItemResult) -> tuple[str, ...]:
    """The notes of the data set's reader, without leaks. Leaks have a tag of their own."""
    return tuple(note for note in run.notes if not note.startswith(LEAK))


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
        key = Address(study, str(address.get("scenario")), str(address.get("recipe")))
        if key not in self.used:
            runs = [run for run in self.of_study(study) if (run.scenario, run.recipe) == key[1:]]
            items = (item.rsplit("-", 1) for item in self.diverged_items(study))
            seeds = (int(seed) for item, seed in items if item == f"{key[1]}-{key[2]}")
            by_seed = sorted(runs, key=lambda run: run.seed)
            self.used[key] = Group(tuple(by_seed), tuple(sorted(seeds)))
        return self.used[key]

    def mark(self, address: Mapping[str, Any]) -> str:
        """The text behind a number of {study, scenario, recipe}: ` LEAK`, ` [1]` for notes,
        diverged seeds."""
        return mark(self.group(address), self.used)

    def remarks(self) -> tuple[str, ...]:
        """The meaning of the marks, for all runs that were read."""
        return tuple(remarks(self.used))

    def is_wanted(self, address: Mapping[str, Any]) -> bool:
        """Whether this size runs {study, scenario, recipe} at all."""
        content = self.studies[address["study"]].content
        return (
            address["scenario"] in content["scenario_names"]
            and address["recipe"] in content["recipe_names"]
        )

    def finished(
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

    def diverged_items(self, study: str) -> dict[str, str]:
        """The study's items that ended without a model because the loss was not finite -> why."""
        path = self.folder(study) / DIVERGED
        return results.record(path) if path.is_file() else {}

    def recorded(self, run: ItemResult, study: str) -> dict[str, Tensor]:
        """The other quantities that a run recorded, "<component>/<quantity>" [T, ...]."""
        tensors: dict[str, Tensor] = load_file(
            self.folder(study) / "runs" / run.key / "recorded.safetensors"
        )
        return tensors

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


def mark(group: Group, used: Mapping[Address, Group]) -> str:
    """The text behind a number. Notes are numbered in the order of `used`."""
    numbers = [
        f" [{n}]" for n, notes in enumerate(_all_notes(used), start=1) if notes in group.notes
    ]
    diverged = f"; {group.divergence}" if group.runs and group.diverged else ""
    return (" LEAK" if group.leaks else "") + "".join(numbers) + diverged


def remarks(used: Mapping[Address, Group]) -> Iterator[str]:
    """One sentence for each leak, each numbered note, and each address with a diverged seed."""
    for leak in dict.fromkeys(leak for group in used.values() for leak in group.leaks):
        who = _who([address for address, group in used.items() if leak in group.leaks], used)
        yield (
            f"LEAK: {who}: {leak}. Such a number says nothing about unseen samples and is not "
            "ranked."
        )
    for number, notes in enumerate(_all_notes(used), start=1):
        who = _who([address for address, group in used.items() if notes in group.notes], used)
        yield f"[{number}] {who}: {'; '.join(notes)}."
    for (study, scenario, recipe), group in used.items():
        if group.diverged:
            seeds = ", ".join(map(str, group.diverged))
            many = "s" if len(group.diverged) > 1 else ""
            rank = (
                ". Its mean is that of the other seeds only, so it is ranked last"
                if group.runs
                else ""
            )
            yield f"{study} ({scenario} {recipe}): {group.divergence} (seed{many} {seeds}){rank}."


def _all_notes(used: Mapping[Address, Group]) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(notes for group in used.values() for notes in group.notes))


def _who(places: Sequence[Address], used: Mapping[Address, Group]) -> str:
    """The studies of `places`, each with its places in brackets.

    Without brackets, it is all places of the study.
    """
    names = []
    for study in dict.fromkeys(address.study for address in places):
        listed = [address for address in places if address.study == study]
        every = [
            address for address, group in used.items() if address.study == study and group.runs
        ]
        some = ", ".join(f"{address.scenario} {address.recipe}" for address in listed)
        names.append(study if listed == every else f"{study} ({some})")
    return ", ".join(names)
