"""Where a result comes from: one hash over everything that it depends on, the commit, the machine and versions."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from pipelines.items import Item
from plugins import recipes

ROOT = Path(__file__).parents[1]
REGISTRY = "plugins.recipes"  # imports every method; only those of the recipe matter


def fingerprint_of(item: Item) -> str:
    """SHA-256 over everything that the result depends on: settings, data, partition, code, torch."""
    digest = hashlib.sha256(json.dumps(item.params(), sort_keys=True).encode())
    digest.update(f"{item.seed} {item.data.checksum} {item.device} {torch.__version__}".encode())
    digest.update(item.indices_file.read_bytes())
    for path in code(item.settings.composition(item.recipe)):
        digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


@cache
def code(recipe: str) -> tuple[Path, ...]:
    """The files under plugins/ that training a recipe runs: the simulation's, its methods', and what they import.

    Neither other methods nor readers and partitions are among them, of which only the results matter; nor the pairs
    that FedML deploys.
    """
    methods = [recipes.METHODS[name].__module__ for name in recipes.parse(recipe)]
    found: dict[str, Path] = {}
    todo = [*methods, *(name for stage in ("items", "train") for name in _imports(ROOT / "pipelines" / f"{stage}.py"))]
    while todo:
        name = todo.pop()
        path = _file(name)
        if path is None or name in found or name.startswith("plugins.silo") or name.endswith(".pair"):
            continue
        found[name] = path
        # Importing a module runs the packages that it lies in.
        todo += [name.rsplit(".", 1)[0]] if "." in name else []
        todo += [] if name == REGISTRY else _imports(path)
    return tuple(sorted(found.values()))


def _file(name: str) -> Path | None:
    """The file of a module or package of ours."""
    place = ROOT.joinpath(*name.split("."))
    candidates = (place.with_suffix(".py"), place / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


@cache
def _imports(path: Path) -> list[str]:
    """The modules under plugins/ that a file names in its imports."""
    return list(_named(ast.parse(path.read_bytes())))


def _named(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "plugins":
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "plugins")


def git_commit() -> str:
    """The commit, with a mark if the tree differs from it; "unknown" outside a checkout."""
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        clean = subprocess.run(["git", "diff", "--quiet", "HEAD"], capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("" if clean.returncode == 0 else "-modified")


def machine(device: torch.device) -> dict[str, str]:
    """What a run's numbers and seconds may depend on beside its settings: processor, cores, versions."""
    gpu = {"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    return {
        "cpu": cpu(), **gpu, "cores": str(len(os.sched_getaffinity(0))), "python": platform.python_version(),
        "torch": torch.__version__, "fedml": version("fedml"),
    }  # fmt: skip


def cpu() -> str:
    """The processor's model; "unknown CPU" where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
