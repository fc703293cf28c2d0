"""The store of finished work: `.items/<fingerprint>/` holds the files of one partition, training or
evaluation.

A fingerprint covers everything that the files depend on. So a stage makes only the files that are
missing from both its own folder and the store. A folder is whole if every file has the SHA-256 that
its receipt names.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.files import UNFINISHED, replace_folder

STORE = ".items"
RECEIPT = "receipt.json"
# How the files were made: seconds, machine, commit. It stays in the store, since it differs from
# run to run.
MADE = "made.json"
DIVERGED = "diverged.txt"  # stored instead of a model: the reason why training failed
# Folders that stages write: of items, each with a receipt, and those that DVC empties before their
# stage runs.
OF_ITEMS, WHOLE = ("partitions", "runs", "evaluation"), ("plan", "report")

Files = Mapping[str, bytes]


def get_or_create(
    folder: Path, repository: Path, fingerprint: str, make: Callable[[], Files]
) -> bool:
    """Makes `folder` hold the files of `fingerprint`. Returns whether it had to call `make`.

    `make` returns the files by name. UserError if `folder` is not ours: it is not replaced.
    """
    _refuse([] if is_ours(folder) else [folder])
    stored = folder_of(repository, fingerprint)
    if is_whole(folder, fingerprint):
        if not is_whole(stored, fingerprint):
            replace_folder(stored, content_of(folder))
        return False
    fresh = not is_whole(stored, fingerprint)
    if fresh:
        replace_folder(stored, with_receipt(fingerprint, make()))
    replace_folder(
        folder, {name: content for name, content in content_of(stored).items() if name != MADE}
    )
    return fresh


def with_receipt(fingerprint: str, files: Files) -> Files:
    """The files, and the receipt with which `is_whole` knows them."""
    hashes = {
        name: hashlib.sha256(content).hexdigest() for name, content in files.items() if name != MADE
    }
    receipt = {"fingerprint": fingerprint, "files": hashes}
    return {**files, RECEIPT: (json.dumps(receipt, indent=2) + "\n").encode()}


def folder_of(repository: Path, fingerprint: str, store: str = STORE) -> Path:
    """The folder of a store for the files of a fingerprint."""
    return repository / store / fingerprint[:16]


def made(repository: Path, fingerprint: str) -> dict[str, Any]:
    """How the files of a fingerprint were made. Empty if they were made elsewhere."""
    try:
        return (
            dict(json.loads((folder_of(repository, fingerprint) / MADE).read_text()))
            if fingerprint
            else {}
        )
    except (OSError, ValueError, TypeError):  # missing, or damaged: nothing is computed from it
        return {}


def is_whole(folder: Path, fingerprint: str) -> bool:
    """Whether a folder holds the files of this fingerprint, unchanged."""
    receipt = _receipt(folder)
    return (
        receipt is not None
        and receipt["fingerprint"] == fingerprint
        and not _damaged(folder, receipt)
    )


def check(folder: Path) -> None:
    """UserError if a file of the folder is missing or was changed after its stage wrote it."""
    receipt = _receipt(folder)
    if receipt is None:
        raise UserError(f"{folder / RECEIPT}: can't be read; `dvc repro` makes the folder again")
    damaged = _damaged(folder, receipt)
    if damaged:
        raise UserError(
            f"{folder / damaged[0]}: is missing or was changed; `dvc repro` makes it again"
        )


def sha256(path: Path) -> str | None:
    """The SHA-256 of a file. None if the file is missing."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def keep_only(folder: Path, names: Collection[str]) -> None:
    """Removes from a stage's folder the results of other settings, and folders that killed
    processes left."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.endswith(UNFINISHED) or (
            path.name not in names and (path / RECEIPT).is_file()
        ):
            shutil.rmtree(path)


def is_ours(folder: Path) -> bool:
    """Whether nothing is lost if `folder` is replaced: it has a receipt, is empty, or does not
    exist."""
    if (folder / RECEIPT).is_file() or not (folder.exists() or folder.is_symlink()):
        return True
    return folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir())


def refuse_foreign(root: Path, *names: str) -> None:
    """UserError for files of other programs in the folders of the items `names`; no names: of all
    stages.

    Stages and DVC would remove it, or take it for a result. Hidden files are let be.
    """
    foreign = [
        path for name in names or OF_ITEMS for path in _visible(root / name) if not is_ours(path)
    ]
    if not names:
        lock = root / "dvc.lock"
        known = lock.read_text() if lock.is_file() else ""
        # They have no receipts: what lies there before DVC knows the folder is not ours.
        foreign += [
            path
            for name in WHOLE
            if f"path: {name}\n" not in known
            for path in _visible(root / name)
        ]
    _refuse(foreign)


def _refuse(foreign: Sequence[Path]) -> None:
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise UserError(
            f"{foreign[0]}{more}: not written by noniid, which replaces what lies in the folders "
            f"{', '.join((*OF_ITEMS, *WHOLE))}; move or delete it"
        )


def _visible(folder: Path) -> list[Path]:
    if folder.is_dir():
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    return [folder] if folder.exists() else []


def _receipt(folder: Path) -> dict[str, Any] | None:
    try:
        receipt = json.loads((folder / RECEIPT).read_text())
        return receipt if {"fingerprint", "files"} <= receipt.keys() else None
    except (OSError, ValueError, AttributeError):
        return None


def _damaged(folder: Path, receipt: Mapping[str, Any]) -> list[str]:
    return [name for name, wanted in receipt["files"].items() if sha256(folder / name) != wanted]


def content_of(folder: Path) -> dict[str, bytes]:
    """The files of a folder by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
