"""The archive of the last commit: the same bytes twice, and the claims judged again from it."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from research import archive

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (archive.ROOT / ".git").exists() or shutil.which("git") is None,
        reason="the archive is made of a git checkout",
    ),
]


def test_the_claims_are_judged_again_from_the_archive(tmp_path: Path) -> None:
    """Unpacked in an empty folder, without git: the page and its tables to the byte.

    It is what `make judge` does after it has made the environment.
    """
    packed = archive.pack(tmp_path / "one")
    assert archive.pack(tmp_path / "two").read_bytes() == packed.read_bytes()
    with tarfile.open(packed) as tar:
        tar.extractall(tmp_path, filter="data")
    root = tmp_path / packed.name.removesuffix(".tar.gz")
    facts = json.loads((root / "ENVIRONMENT.json").read_text())
    assert facts["commit"][:12] == root.name.rsplit("-", 1)[1]
    assert sum(facts["of_runs"]["torch"].values()) == facts["runs"] > 0
    for path, digest in facts["sha256"].items():
        assert hashlib.sha256((root / path).read_bytes()).hexdigest() == digest, path
    words = ["-m", "fedml_noniid", "claims", "--size", "small", "--no-run"]
    subprocess.run([sys.executable, *words], cwd=root, check=True, capture_output=True)
    made = root / "research" / "built" / "claims" / "small"
    compared = [path for path in made.glob("claims*") if path.suffix != ".png"]
    assert len(compared) > 10
    for path in compared:
        assert path.read_bytes() == (root / "docs" / "results" / path.name).read_bytes(), path.name
