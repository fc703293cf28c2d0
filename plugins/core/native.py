"""Compiles our C++ files, once per version of a file and kind of machine."""

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

LOG = logging.getLogger(__name__)
SWITCH = "FEDML_NONIID_COMPILED"  # environment variable; 0: everything in Python


def library(source: Path, version: str = "") -> Path:
    """Where the compiled file lies: among torch's extensions, by source, `version` of what it is
    linked to and of the flags, and kind of processor."""
    kind = f"{version} {platform.system()} {platform.machine()}"
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
