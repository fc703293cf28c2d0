"""Compiles and loads sums.cpp, once per version of the file and kind of machine."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fedml_noniid.core.errors import UserError

LOG = logging.getLogger(__name__)
SWITCH = "FEDML_NONIID_COMPILED"  # environment variable; 0: everything in Python


def loaded(source: Path, flags: Sequence[str]) -> ctypes.CDLL | None:
    """Loads the compiled file, and compiles it first if needed. None, with a line in the log, if
    that fails; None if it is switched off.

    UserError for an unknown value of the environment variable.
    """
    switch, path = os.environ.get(SWITCH, ""), library(source, flags)
    if switch not in ("", "0", "1"):
        raise UserError(
            f"environment variable {SWITCH}: {switch!r} is unknown; allowed: 0 (sums run in "
            "Python), 1 or nothing (sums run in C++ if there is a compiler)"
        )
    if switch == "0":
        return None
    try:
        if not path.exists():
            _compile(path, source, flags)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.CalledProcessError) as error:
        LOG.warning(
            "%s run in Python, because their C++ can't be compiled or loaded: %s",
            source.stem,
            (getattr(error, "stderr", "") or str(error)).partition("\n")[0],
        )
        return None


def library(source: Path, flags: Sequence[str]) -> Path:
    """Returns the path of the compiled file: among torch's extensions, by source, flags and kind
    of processor."""
    kind = " ".join((*flags, platform.system(), platform.machine())).encode()
    key = hashlib.sha256(source.read_bytes() + kind).hexdigest()[:16]
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    return Path(root) / f"fedml_noniid-{key}.so"


def _compile(path: Path, source: Path, flags: Sequence[str]) -> None:
    """Compiles a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Its own folder, so that processes can compile at the same time, and that none loads half a
    # file.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder) / path.name
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        command = [*compiler, "-std=c++17", "-fPIC", "-shared", str(source), *flags]
        subprocess.run([*command, "-o", str(whole)], check=True, capture_output=True, text=True)
        whole.replace(path)
