"""Marks what a reader must know before comparing runs: leaks, notes on the data, diverged seeds.

All facts come from the runs' own files (run.json, diverged.json), so they hold for the runs as they
were made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.plugins.data.dataset import LEAK


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
        who = _who([place for place, group in used.items() if leak in group.leaks], used)
        yield (
            f"LEAK: {who}: {leak}. Such a number says nothing about unseen samples and is not "
            "ranked."
        )
    for number, notes in enumerate(_all_notes(used), start=1):
        who = _who([place for place, group in used.items() if notes in group.notes], used)
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
    found = []
    for study in dict.fromkeys(place.study for place in places):
        listed = [place for place in places if place.study == study]
        every = [place for place, group in used.items() if place.study == study and group.runs]
        some = ", ".join(f"{place.scenario} {place.recipe}" for place in listed)
        found.append(study if listed == every else f"{study} ({some})")
    return ", ".join(found)
