"""Packs the last commit for a repository with DOIs: `make archive`.

dist/fedml-noniid-<version>-<commit>.tar.gz has every committed file, the code version, and the
facts of the environment in which the committed numbers were made. The same commit gives the same
bytes.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RUNS = "docs/results/claims-runs.csv"
LOCKS = ("requirements.lock", "dvc.lock")
FACTS = ("commit", "cpu", "torch")  # columns of RUNS
README = """\
# {name}

The code, the locked environment and the committed numbers behind the page docs/results/claims.md.
Made of commit {commit} of {date}.

One command judges the claims again, without any run, and compares the page and its tables with the
committed ones, byte for byte. It needs Python 3.11, make, a C compiler and 6 GB of disk, as it
first makes the environment of requirements.lock:

    make judge

ENVIRONMENT.json has the processors, the versions of torch and the code versions of the {runs} runs
behind the claims, and the SHA-256 of the locks and of the tables. docs/claims.md says how a claim
is judged. CITATION.cff says how to cite.
"""


def git(*words: str) -> bytes:
    """What git prints."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True).stdout


def environment(commit: str) -> dict[str, object]:
    """The facts of ENVIRONMENT.json, from the files of a commit."""

    def content(path: str) -> bytes:
        return git("show", f"{commit}:{path}")

    runs = list(csv.DictReader(io.StringIO(content(RUNS).decode())))
    tables = git("ls-tree", "--name-only", commit, "docs/results/").decode().split()
    hashed = [*LOCKS, *(path for path in tables if "/claims" in path)]
    return {
        "commit": commit,
        "runs": len(runs),
        "of_runs": {
            fact: dict(sorted(Counter(run[fact] for run in runs).items())) for fact in FACTS
        },
        "sha256": {path: hashlib.sha256(content(path)).hexdigest() for path in hashed},
    }


def pack(folder: Path) -> Path:
    """Writes the archive of the last commit into `folder`."""
    commit, date = git("show", "-s", "--format=%H %cs", "HEAD").decode().split()
    citation = git("show", f"{commit}:CITATION.cff").decode()
    version = re.search(r"^version: (.+)$", citation, re.MULTILINE)
    assert version is not None, "a test compares it with the package's"
    name = f"fedml-noniid-{version[1]}-{commit[:12]}"
    facts = environment(commit)
    added = {
        "ARCHIVE.md": README.format(name=name, commit=commit, date=date, runs=facts["runs"]),
        "ENVIRONMENT.json": json.dumps(facts, indent=1) + "\n",
    }
    files = [f"--add-virtual-file={name}/{file}:{text}" for file, text in added.items()]
    tar = git("archive", "--format=tar", f"--prefix={name}/", *files, commit)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.tar.gz"
    path.write_bytes(gzip.compress(tar, mtime=0))
    return path


if __name__ == "__main__":
    if git("status", "--porcelain"):
        sys.exit("there are changes that no commit has; commit them first")
    path = pack(ROOT / "dist")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    sys.stdout.write(f"{path.relative_to(ROOT)}\nsha256 {digest}\n")
