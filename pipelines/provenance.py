"""Where a result comes from: one hash over everything that it depends on, and the commit."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path

import torch

from pipelines.items import Item


def fingerprint_of(item: Item) -> str:
    """SHA-256 over everything that the result depends on: settings, data, partition, code, torch."""
    digest = hashlib.sha256(json.dumps(item.params(), sort_keys=True).encode())
    digest.update(f"{item.seed} {item.data.checksum} {item.device} {torch.__version__}".encode())
    digest.update(item.indices_file.read_bytes())
    plugins = Path(__file__).parents[1] / "plugins"
    for path in sorted(plugins.rglob("*.py")):
        name = path.relative_to(plugins)
        if name.parts[0] != "silo" and name.name != "pair.py":
            digest.update(name.as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def git_commit() -> str:
    """The commit, with a mark if the tree differs from it; "unknown" outside a checkout."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        clean = subprocess.run(["git", "diff", "--quiet", "HEAD"], capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("" if clean.returncode == 0 else "-modified")
