"""Compiles sums.cpp, once per version of the file and kind of machine."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from fedml_noniid.plugins.core.errors import UserError

LOG = logging.getLogger(__name__)
SWITCH = "FEDML_NONIID_COMPILED"  # environment variable; 0: everything in Python


def switched_off() -> bool:
    """Says whether everything runs in Python. UserError for an unknown value of the environment
    variable."""
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        raise UserError(
            f"environment variable {SWITCH}: {value!r} is unknown; allowed: 0 (sums run in "
            "Python), 1 or nothing (sums run in C++ if there is a compiler)"
        )
    return value == "0"


def library(source: Path, flags: str) -> Path:
    """Returns the path of the compiled file: among torch's extensions, by source, flags and kind
    of processor."""
    kind = f"{flags} {platform.system()} {platform.machine()}"
    key = hashlib.sha256(source.read_bytes() + kind.encode()).hexdigest()[:16]
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    return Path(root) / f"fedml_noniid-{key}.so"


@cache
def built(path: Path, source: Path, flags: Sequence[str]) -> bool:
    """Compiles a file. False if that fails, which is not tried again."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Its own folder, so that processes can compile at the same time, and that none finds half a
        # file.
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [*compiler, "-std=c++17", "-fPIC", "-shared", str(source), *flags]
            subprocess.run([*command, "-o", str(made)], check=True, capture_output=True, text=True)
            made.replace(path)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
        LOG.warning(
            "%s runs in Python, because the compiler failed: %s",
            source.stem,
            reason.partition("\n")[0],
        )
        return False
    return True
