"""Facts that a reader must know before comparing runs: leaks, notes on the data, diverged seeds.

All facts come from the runs' own files (run.json, diverged.json), so they hold for the runs as they
were made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.plugins.data.dataset import LEAK

Place = tuple[str, str, str]  # study, scenario, recipe


class Group(NamedTuple):
    """The runs of one place, one per seed."""

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


def leak_of(run: ItemResult) -> str:
    """The part of the test set that the data or the method showed to training; "" if none."""
    tag = run.tags.get("leak", "none")
    return "" if tag == "none" else tag


def notes_of(run: ItemResult) -> tuple[str, ...]:
    """The notes of the data set's reader, without leaks. Leaks have a tag of their own."""
    return tuple(note for note in run.notes if not note.startswith(LEAK))


def some_diverge(diverged: int, ended: int) -> str:
    """`1 of 3 seeds diverges`, "diverges" if no seed has ended, "" if no seed diverged."""
    if not diverged or not ended:
        return "diverges" if diverged else ""
    return f"{diverged} of {diverged + ended} seeds diverge{'s' if diverged == 1 else ''}"


def said_of(name: str, group: Group) -> list[str]:
    """A sentence on a method with a diverged seed; no sentence on any other method."""
    how = some_diverge(len(group.diverged), len(group.runs))
    return [] if not how else [f"{name}: {how}." if group.runs else f"{name} {how}."]


def mark(group: Group, used: Mapping[Place, Group]) -> str:
    """The text behind a number. Notes are numbered in the order of `used`."""
    numbers = [
        f" [{n}]" for n, notes in enumerate(_all_notes(used), start=1) if notes in group.notes
    ]
    how = some_diverge(len(group.diverged), len(group.runs)) if group.runs else ""
    return (" LEAK" if group.leaks else "") + "".join(numbers) + (f"; {how}" if how else "")


def remarks(used: Mapping[Place, Group]) -> Iterator[str]:
    """One sentence for each leak, each numbered note, and each place with a diverged seed."""
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
            how = some_diverge(len(group.diverged), len(group.runs))
            seeds = (
                f"seed{'s' if len(group.diverged) > 1 else ''} "
                f"{', '.join(map(str, group.diverged))}"
            )
            over = (
                ". Its mean is that of the other seeds only, so it is ranked last"
                if group.runs
                else ""
            )
            yield f"{study} ({scenario} {recipe}): {how} ({seeds}){over}."


def _all_notes(used: Mapping[Place, Group]) -> list[tuple[str, ...]]:
    return list(dict.fromkeys(notes for group in used.values() for notes in group.notes))


def _who(places: Sequence[Place], used: Mapping[Place, Group]) -> str:
    """The studies of `places`, each with its places in brackets.

    Without brackets, it is all places of the study.
    """
    found = []
    for study in dict.fromkeys(place[0] for place in places):
        own = [place for place in places if place[0] == study]
        every = [place for place, group in used.items() if place[0] == study and group.runs]
        some = f" ({', '.join(f'{scenario} {recipe}' for _, scenario, recipe in own)})"
        found.append(study + ("" if own == every else some))
    return ", ".join(found)
