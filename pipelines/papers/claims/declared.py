"""When a claim was written down: its text at the first run, and git's word on the file.

`declared.json` beside the page has the SHA-256 of each claim with its study, and the commit, from
before the claim's first run. A claim whose SHA-256 is another one now was changed after its runs
were seen.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

from fedml_noniid.pipelines.experiment.results import record
from fedml_noniid.pipelines.papers.claims.spec import Named
from fedml_noniid.plugins.data.files import write_whole

FILE = "declared.json"
Facts = Mapping[str, Mapping[str, str]]  # claim -> sha256, commit


def declare(folder: Path, claims: Iterable[Named], commits: Mapping[str, str]) -> None:
    """Notes the claims that `folder` does not know yet. `commits`: by paper."""
    known = dict(read(folder))
    new = {
        one.id: {"sha256": one.sha256, "commit": commits[one.paper]}
        for one in claims
        if one.id not in known
    }
    if new:
        write_whole(folder / FILE, json.dumps(known | new, indent=2, sort_keys=True) + "\n")


def read(folder: Path) -> Facts:
    """The claims that were noted; empty without a run. UserError for a file that can't be read."""
    path = folder / FILE
    return record(path) if path.is_file() else {}


def commit_of(path: Path) -> str:
    """The last commit of a file. It says so where the file is uncommitted, or changed since."""
    try:
        # A file name alone, with its folder as working directory: git follows no link of the
        # package.
        own = path.resolve()
        said = [
            subprocess.run(
                ["git", *command, "--", own.name],
                cwd=own.parent,
                capture_output=True,
                text=True,
                check=True,
            )
            for command in (("log", "-1", "--format=%h"), ("status", "--porcelain"))
        ]
    except (OSError, subprocess.CalledProcessError):
        return "unknown: no git checkout"
    commit, changed = (one.stdout.strip() for one in said)
    if not commit:
        return "not committed"
    return f"{commit}, changed since" if changed else commit


def words(one: Named, facts: Facts, has_run: bool) -> str:
    """Whether the claim is as it was before its first run, for people.

    `has_run`: whether any of its runs is there.
    """
    fact = facts.get(one.id)
    if fact is None:
        return "NOT written down before its first run" if has_run else "no run yet"
    same = fact["sha256"] == one.sha256
    return (
        f"written down before its first run ({fact['commit']})"
        if same
        else (f"CHANGED after its first run (first written at {fact['commit']})")
    )
