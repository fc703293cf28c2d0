"""What a result depends on beside its settings, as far as it is known without importing torch."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from pathlib import Path

from fedml_noniid import extras

READERS = ("numpy", "pandas", "pillow", "scikit-learn")


def sources(folders: Iterable[Path]) -> dict[str, str]:
    """Path -> SHA-256 of all files below some folders, but for Python's caches."""
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in folders
        for path in sorted(folder.rglob("*"))
        if path.suffix != ".pyc" and path.is_file()
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
