"""The committed numbers of the claims, docs/results/claims*: what has run before need not run again
to be judged.

A claim takes its numbers from there if its own runs are not all here, and if its test and study are
still the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from fedml_noniid.pipelines.experiment.results import record, table
from fedml_noniid.pipelines.papers.claims.quantities import Cell, Part
from fedml_noniid.pipelines.papers.claims.runs import Ran
from fedml_noniid.pipelines.papers.claims.spec import Named
from fedml_noniid.pipelines.papers.claims.trials import PER_TRIAL, TRIALS
from fedml_noniid.plugins.core.errors import UserError

FACTS, VALUES, RUNS, ROUNDS = (
    "claims.json",
    "claims-values.csv",
    "claims-runs.csv",
    "claims-rounds-{}.csv",
)
PER_VALUE = [
    "paper",
    "claim",
    "part",
    "seed",
    "number",
    "role",
    "scenario",
    "recipe",
    "value",
    "item",
]
PER_RUN = ["study", "item"]  # of the test accuracies by round; then a column per round


class Published(NamedTuple):
    """The committed files, as far as there are any."""

    folder: Path | None = None
    facts: Mapping[
        str, Mapping[str, str]
    ] = {}  # claim -> sha256 and commit of its first writing, sha256 of the `test`
    studies: Mapping[str, str] = {}  # "paper study" -> what was run
    values: Mapping[str, Sequence[Mapping[str, str]]] = {}  # claim -> its lines
    runs: Mapping[tuple[str, str], Mapping[str, Ran]] = {}  # (paper, study) -> item -> run

    def has(self, named: Named) -> bool:
        """Whether it has all runs of the claim as it is now."""
        runs = self.runs.get((named.paper, named.claim.study), {})
        same = self.facts.get(named.id, {}).get("test") == named.test
        return same and all(item in runs for item in named.items)

    def parts(self, named: Named) -> tuple[Part, ...]:
        """The claim's numbers, tested or shown beside."""
        runs = self.runs[named.paper, named.claim.study]
        found = []
        for words, of_part in groupby(self.values.get(named.id, ()), key=lambda line: line["part"]):
            values: dict[int, float] = {}
            cells: dict[int, tuple[Cell, ...]] = {}
            for line in of_part:
                seed = int(line["seed"])
                cell = Cell(
                    line["role"],
                    line["scenario"],
                    line["recipe"],
                    runs[line["item"]],
                    float(line["value"]),
                )
                values[seed] = float(line["number"])
                cells[seed] = (*cells.get(seed, ()), cell)
            found.append(Part(words, values, cells))
        return tuple(found)

    def trials(self, studies: Collection[tuple[str, str]]) -> list[list[object]]:
        """The lines on tuning of (paper, study)."""
        path = self.folder / TRIALS if self.folder else None
        if path is None or not path.is_file():
            return []
        return [
            [line[key] for key in PER_TRIAL]
            for line in table(path)
            if (line["paper"], line["study"]) in studies
        ]

    def rounds(self, paper: str, studies: Sequence[str]) -> list[list[object]]:
        """The runs of studies: study, item, accuracy of each round."""
        path = self.folder / ROUNDS.format(paper) if self.folder else None
        if path is None or not path.is_file():
            return []
        return [list(line.values()) for line in table(path) if line["study"] in studies]


def read(folder: Path) -> Published:
    """The files in `folder`; empty if there are none.

    UserError for files that can't be read or don't fit.
    """
    if not (folder / FACTS).is_file():
        return Published()
    facts: dict[str, Any] = record(folder / FACTS)
    values: dict[str, list[Mapping[str, str]]] = {}
    for line in table(folder / VALUES):
        values.setdefault(line["claim"], []).append(line)
    runs: dict[tuple[str, str], dict[str, Ran]] = {}
    for line in table(folder / RUNS):
        ran = Ran.read(line)
        runs.setdefault((line["paper"], ran.study), {})[ran.item] = ran
    try:
        return Published(folder, facts["claims"], facts["studies"], values, runs)
    except KeyError as error:
        raise UserError(
            f"{folder / FACTS}: the key {error} is missing; `noniid claims --write` makes it"
        ) from None
