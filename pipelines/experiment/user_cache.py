"""The user's cache: values that follow from files that have not changed.

Without it, they are found again in a second.

A cache file that is missing, damaged, of other code or not writable is never an error.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedml_noniid.plugins import extras
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.files import write_whole

# since a file's last change: clocks of file systems are too coarse for later ones
SETTLED_NS = 2_000_000_000
READERS = ("numpy", "pandas", "pillow", "scikit-learn")
Stamp = list[int]


def folder() -> Path:
    """The folder `fedml-noniid` in the user's cache. RuntimeError for a user without a home."""
    named = Path(os.environ.get("XDG_CACHE_HOME") or "")
    return (named if named.is_absolute() else Path.home() / ".cache") / "fedml-noniid"


def read(name: str, key: str) -> Any:
    """The value that `write` stored under this name with this key. None if there is none."""
    try:
        digest, _, content = _file(name).read_bytes().partition(b"\n")
        return json.loads(content) if digest == _digest(key, content) else None
    except (OSError, RuntimeError):
        return None


def write(name: str, key: str, value: object) -> None:
    """Stores a value that JSON can hold."""
    content = json.dumps(value).encode()
    with contextlib.suppress(UserError, RuntimeError):
        write_whole(_file(name), _digest(key, content) + b"\n" + content, private=True)


def stamp(path: Path) -> Stamp:
    """What changes when a file is edited or replaced. OSError if the file is missing."""
    found = path.stat()
    return [found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino]


def is_settled(of: Stamp) -> bool:
    """Whether an edit of a file with this stamp gives it another stamp for sure."""
    return time.time_ns() - max(of[:2]) > SETTLED_NS


def stamps(folders: Iterable[Path]) -> dict[str, Stamp]:
    """The stamps of all files below some folders, but for caches of Python."""
    return {
        str(path): stamp(path)
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }


@functools.cache
def of_cpu(fact: str) -> str:
    """A line of /proc/cpuinfo. "unknown CPU" if the system has none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith(fact)), "unknown CPU"
    )


def readers() -> dict[str, str]:
    """The versions of the libraries that read data sets, and that split and decode them. None is
    imported."""
    return {name: extras.version(name) for name in READERS}


def _file(name: str) -> Path:
    return folder() / f"{name}.json"


def _digest(key: str, content: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\n" + content).hexdigest().encode()
