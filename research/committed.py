"""Reads the committed numbers of the claims, in docs/results, and when each was written down.

What has run before need not run again to be judged. A claim takes its numbers from there if its
runs are not all here, and if its test and study are still the same.

`declared.json` beside the page has the SHA-256 of each claim with its study, and the commit, from
before the claim's first run. A claim whose SHA-256 is another one now was changed after its runs
were seen.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.files import write_whole
from fedml_noniid.pipelines.experiment.results import record, table
from research.claims import Named, Why

FACTS, DECLARED = "claims.json", "declared.json"
FILES = {
    "values": "claims-values.csv",
    "runs": "claims-runs.csv",
    "trials": "claims-trials.csv",
    "rounds": "claims-rounds-{}.csv",
}
RUNS = ["study", "item", "accuracy", "mib", "seconds", "weights_sha256"]
RUNS += ["fingerprint", "mlflow_run", "commit", "cpu", "torch"]
VALUES = ["part", "seed", "number", "role", "scenario", "recipe", "value", "item"]
TRIALS = ["paper", "study", "recipe", "values", "seeds", "validation_accuracy", "chosen"]
NUMBERS = ("accuracy", "mib", "seconds", "seed", "number", "value")
Facts = Mapping[str, Mapping[str, Any]]  # claim -> sha256, commit, seen: methods that had run


class Committed:
    """The committed files, as far as there are any. UserError for files that can't be read."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder and (folder / FACTS).is_file() else None
        facts = record(self.folder / FACTS) if self.folder else {"claims": {}, "studies": {}}
        try:
            self.facts: Facts = facts["claims"]  # also the SHA-256 of the `test`
            self.studies: Mapping[str, str] = facts["studies"]  # "paper study" -> what was run
        except KeyError as error:
            raise UserError(
                f"{folder}/{FACTS}: the key {error} is missing; "
                "`python -m research claims --write` makes it"
            ) from None
        self._values = self._frame(FILES["values"], ["paper", "claim", *VALUES])
        self._runs = self._frame(FILES["runs"], ["paper", *RUNS])

    def look(self, named: Named) -> int:
        """The last look, from 0, of which it has all runs of the claim as it is now; -1: none."""
        if self.facts.get(named.id, {}).get("test") != named.test:
            return -1
        return named.reached(self.runs_of(named)["item"])

    def runs_of(self, named: Named) -> pd.DataFrame:
        """The runs of the claim."""
        runs = self._runs
        runs = runs[(runs["paper"] == named.paper) & (runs["study"] == named.claim.study)]
        items = list(dict.fromkeys(named.items(len(named.looks) - 1)))
        runs = runs.set_index("item", drop=False).reindex(items).dropna(how="all")[RUNS]
        return runs.reset_index(drop=True)

    def values_of(self, named: Named) -> pd.DataFrame:
        """The claim's numbers, tested or shown beside."""
        return self._values[self._values["claim"] == named.id][VALUES]

    def trials(self, studies: Iterable[tuple[str, str]]) -> pd.DataFrame:
        """The lines on tuning of (paper, study)."""
        frame, wanted = self._frame(FILES["trials"], TRIALS), set(studies)
        return frame[[pair in wanted for pair in zip(frame["paper"], frame["study"], strict=True)]]

    def rounds(self, paper: str, studies: Iterable[str]) -> pd.DataFrame:
        """The runs of studies: study, item, accuracy of each round."""
        frame = self._frame(FILES["rounds"].format(paper), ["study", "item"])
        return frame[frame["study"].isin(set(studies))]

    def _frame(self, name: str, columns: Sequence[str]) -> pd.DataFrame:
        """A file as a table; an empty one without the file."""
        path = self.folder / name if self.folder else None
        if path is None or not path.is_file():
            return pd.DataFrame(columns=columns)
        frame = pd.DataFrame(table(path))
        try:
            for column in set(columns) & set(NUMBERS):
                frame[column] = frame[column].replace("", "nan").astype(float)
            frame[columns]  # a KeyError names missing columns
            return frame.astype({"seed": int}) if "seed" in columns else frame
        except (KeyError, ValueError) as error:
            raise UserError(
                f"{path}: can't be read ({error}); `python -m research claims --write` makes it"
            ) from None


def stacked(frames: Iterable[pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    """The lines of all tables."""
    full = [frame for frame in frames if len(frame)]
    if not full:
        return pd.DataFrame(columns=columns)
    return pd.concat(full, ignore_index=True)[list(columns)]


def declare(
    folder: Path, claims: Iterable[Named], commits: Mapping[str, str], ended: Collection[str] = ()
) -> None:
    """Notes the claims that `folder` does not know yet, with the methods whose runs had ended.

    `commits`: by paper. `ended`: runs of the claims' study.
    """
    noted = dict(declared(folder))
    new: dict[str, dict[str, Any]] = {}
    for claim in claims:
        if claim.id not in noted:
            known = {item.rsplit("-", 1)[0] for item in {*ended} & {*claim.items(-1)}}
            seen = [
                recipe for scenario, recipe in claim.claim.cells if f"{scenario}-{recipe}" in known
            ]
            new[claim.id] = {"sha256": claim.sha256, "commit": commits[claim.paper]}
            new[claim.id] |= {"seen": sorted({*seen})} if seen else {}
    if new:
        write_whole(folder / DECLARED, json.dumps(noted | new, indent=2, sort_keys=True) + "\n")


def declared(folder: Path) -> Facts:
    """The claims that were noted; empty without a run. UserError for a file that can't be read."""
    path = folder / DECLARED
    return record(path) if path.is_file() else {}


def when_written(named: Named, facts: Facts, has_run: bool) -> str:
    """Whether the claim is as it was before its first run, for people.

    `has_run`: whether any of its runs is there.
    """
    fact = facts.get(named.id)
    if fact is None:
        return "NOT written down before its first run" if has_run else "no run yet"
    seen = " and ".join(seen_before(named, facts))
    when = f"when runs of {seen} were known" if seen else "before its first run"
    if fact["sha256"] == named.sha256:
        return f"written down {when} ({fact['commit']})"
    if fact["sha256"] == named.sha256_without_margin:
        return f"written down {when} ({fact['commit']}), its margin later"
    return f"CHANGED after its first run (first written at {fact['commit']})"


def seen_before(named: Named, facts: Facts) -> list[str]:
    """The methods whose runs were known when the claim was written, as far as that was noted."""
    said = named.claim.seen if isinstance(named.claim, Why) else []
    return sorted({*said, *facts.get(named.id, {}).get("seen", [])})


def is_margin_later(named: Named, facts: Facts) -> bool:
    """Whether the claim has a margin that is not the one of before its first run."""
    if named.claim.margin is None:
        return False
    fact = facts.get(named.id, {})
    return fact.get("sha256") != named.sha256 or "seen" in fact


def commit_of(path: Path) -> str:
    """The last commit of a file. It says so where the file is uncommitted, or changed since."""
    # A file name alone, with its folder as working directory: git follows no link of the package.
    path = path.resolve()
    try:
        commit, changed = (
            subprocess.run(
                ["git", *command, "--", path.name],
                cwd=path.parent,
                capture_output=True,
                text=True,
                check=True,
            ).stdout.strip()
            for command in (("log", "-1", "--format=%H"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown: no git checkout"
    if not commit:
        return "not committed"
    return f"{commit}, changed since" if changed else commit
