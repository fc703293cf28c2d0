"""The store of finished work: `.items/<fingerprint>/` holds the files of one partition, training or evaluation.

A fingerprint covers everything that the files depend on. So a stage makes only the files that are missing from both its
own folder and the store. A folder is whole if every file has the SHA-256 that its receipt names.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.files import replace_folder

STORE = ".items"
RECEIPT = "receipt.json"
# How the files were made: seconds, machine, commit. It stays in the store, since it differs from run to run.
MADE = "made.json"

Files = Mapping[str, bytes]


def settle(folder: Path, repository: Path, fingerprint: str, make: Callable[[], Files]) -> bool:
    """Makes `folder` hold the files of `fingerprint`. Returns whether it had to call `make`.

    `make` returns the files by name.
    """
    stored = place(repository, fingerprint)
    if is_whole(folder, fingerprint):
        if not is_whole(stored, fingerprint):
            replace_folder(stored, _content(folder))
        return False
    fresh = not is_whole(stored, fingerprint)
    if fresh:
        files = make()
        hashes = {name: hashlib.sha256(content).hexdigest() for name, content in files.items() if name != MADE}
        receipt = {"fingerprint": fingerprint, "files": hashes}
        replace_folder(stored, {**files, RECEIPT: (json.dumps(receipt, indent=2) + "\n").encode()})
    replace_folder(folder, {name: content for name, content in _content(stored).items() if name != MADE})
    return fresh


def place(repository: Path, fingerprint: str) -> Path:
    """The store's folder for the files of a fingerprint."""
    return repository / STORE / fingerprint[:16]


def made(repository: Path, fingerprint: str) -> dict[str, Any]:
    """How the files of a fingerprint were made. Empty if they were made elsewhere."""
    path = place(repository, fingerprint) / MADE
    return dict(json.loads(path.read_text())) if fingerprint and path.is_file() else {}


def is_whole(folder: Path, fingerprint: str) -> bool:
    """Whether a folder holds the files of this fingerprint, unchanged."""
    receipt = _receipt(folder)
    return receipt is not None and receipt["fingerprint"] == fingerprint and not _damaged(folder, receipt)


def check(folder: Path) -> None:
    """UserError if a file of the folder is missing or was changed after its stage wrote it."""
    receipt = _receipt(folder)
    if receipt is None:
        raise UserError(f"{folder / RECEIPT}: can't be read; `dvc repro` makes the folder again")
    damaged = _damaged(folder, receipt)
    if damaged:
        raise UserError(f"{folder / damaged[0]}: is missing or was changed; `dvc repro` makes it again")


def sha256(path: Path) -> str | None:
    """The SHA-256 of a file. None if the file is missing."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def keep_only(folder: Path, names: Collection[str]) -> None:
    """Removes everything else from a stage's folder: results of other settings."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name not in names:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _receipt(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / RECEIPT).read_text())
        return found if {"fingerprint", "files"} <= found.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _damaged(folder: Path, receipt: Mapping[str, Any]) -> list[str]:
    return [name for name, wanted in receipt["files"].items() if sha256(folder / name) != wanted]


def _content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
