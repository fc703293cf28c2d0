"""The user's cache: values that follow from files that have not changed. Without it, they are found again in a second.

A cache file that is missing, damaged, of other code or not writable is never an error.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.files import write_whole

SETTLED_NS = 2_000_000_000  # since a file's last change: clocks of file systems are too coarse for later ones
Stamp = list[int]


def folder() -> Path:
    """The folder `fedml-noniid` in the user's cache. RuntimeError for a user without a home."""
    named = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (named if named.is_absolute() else Path.home() / ".cache") / "fedml-noniid"


def read(name: str, key: str) -> Any:
    """The value that `write` stored under this name with this key. None if there is none."""
    try:
        digest, text = (folder() / f"{name}.json").read_text().split("\n", 1)
        return json.loads(text) if digest == _digest(key, text) else None
    except (OSError, ValueError, RuntimeError):
        return None


def write(name: str, key: str, value: object) -> None:
    """Stores a value that JSON can hold."""
    text = json.dumps(value)
    try:
        write_whole(folder() / f"{name}.json", f"{_digest(key, text)}\n{text}", private=True)
    except (UserError, RuntimeError):
        return


def stamp(path: Path) -> Stamp:
    """What changes when a file is edited or replaced. OSError if the file is missing."""
    found = path.stat()
    return [found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino]


def is_settled(of: Stamp) -> bool:
    """Whether an edit of a file with this stamp gives it another stamp for sure."""
    return time.time_ns() - max(of[:2]) > SETTLED_NS


def _digest(key: str, text: str) -> str:
    return hashlib.sha256(f"{key}\n{text}".encode()).hexdigest()
