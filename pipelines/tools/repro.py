"""`make repro`: checks params.yaml, runs `dvc repro`, brings MLflow up to date, prints the table.

It passes its arguments to `dvc repro`: `python -m fedml_noniid.pipelines.tools.repro train` stops after that stage.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ruamel.yaml import YAML

from fedml_noniid.plugins.core.errors import UserError

LOCK = Path(".dvc") / "tmp" / "repro.lock"
CHECKED = Path(".dvc") / "tmp" / "checked"
SOURCES = ("plugins", "pipelines")
KIND = "plan/machine.json"


def repro(root: Path, arguments: Sequence[str]) -> int:
    """Runs the out-of-date stages. Returns 0, or the exit code of the first command that fails."""
    with _alone(root):
        if not _is_checked(root):
            from fedml_noniid.pipelines.experiment import check

            code = check.main(["--root", str(root)])
            if code:
                return code
            (root / CHECKED).touch()
        if not (root / "report").exists() and (root / "dvc.lock").exists():
            # Takes outputs from DVC's cache. It is faster than stages that take them from the store.
            subprocess.run(["dvc", "checkout", "--quiet", "--allow-missing"], cwd=root)
        process = subprocess.Popen(["dvc", "repro", *arguments], cwd=root)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.wait()  # DVC was interrupted too; wait for its end
            raise
        if code == 0:
            code = subprocess.run(
                [sys.executable, "-m", "fedml_noniid.pipelines.tracking", "sync"], cwd=root
            ).returncode
        if code == 0 and not arguments:
            sys.stdout.write(f"\n{(root / 'report' / 'table.txt').read_text()}\n{certificate(root)}\n")
        return code


def certificate(root: Path) -> str:
    """One line: whether dvc.lock has the bits of the committed dvc.lock."""
    shown = subprocess.run(["git", "show", "HEAD:./dvc.lock"], cwd=root, capture_output=True, text=True)
    if shown.returncode:
        return "dvc.lock is the certificate of these bits: commit it, and others can compare theirs."
    theirs, ours = _hashes(shown.stdout), _hashes((root / "dvc.lock").read_text())
    if theirs == ours:
        return "dvc.lock is the committed one: the same bits."
    if theirs.get(KIND) != ours.get(KIND):
        here = ", ".join(json.loads((root / KIND).read_text()).values())
        return f"dvc.lock: the committed one was made on another kind of machine than this ({here}); bits may differ."
    if theirs.get("plan") != ours.get("plan"):
        return "dvc.lock differs from the committed one, as settings or code do."
    other = ", ".join(path for path in ours if ours[path] != theirs.get(path))
    return f"WARNING: dvc.lock: settings, code and kind of machine are the committed ones, but not the bits of {other}."


def _hashes(lock: str) -> dict[str, str]:
    """Path -> hash of every dependency and output of the stages."""
    stages = YAML(typ="safe", pure=True).load(lock)["stages"].values()
    found = {part["path"]: part["md5"] for about in stages for kind in ("deps", "outs") for part in about[kind]}
    return {path: md5 for path, md5 in found.items() if path not in SOURCES}


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Allows one `make repro` at a time. The lock ends with the process, also after a crash."""
    path = root / LOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another `make repro` runs in {root.resolve()}; wait for its end, or stop it") from None
        yield


def _is_checked(root: Path) -> bool:
    """Whether no file was edited since the last check. It saves a check, which imports torch and takes seconds."""
    if not (root / CHECKED).exists():
        return False
    since = (root / CHECKED).stat().st_mtime
    files = [root / "params.yaml", *(path for folder in SOURCES for path in (root / folder).rglob("*.py"))]
    return all(path.stat().st_mtime <= since for path in files if path.exists())


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    try:
        return repro(Path(), arguments)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; `make repro` goes on from here\n")
        return 130


if __name__ == "__main__":
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    sys.exit(main(sys.argv[1:]))
