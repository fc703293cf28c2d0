"""What only torch can tell of an experiment, kept in its `.dvc/tmp` until settings, code, torch or
processor change.

With it, stages that compute nothing (plan, report) and `noniid run` without work do not import
torch.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fedml_noniid.pipelines.experiment import usercache

PACKAGE = Path(__file__).parents[2]
CODE = tuple(PACKAGE / folder for folder in ("plugins", "pipelines"))
FILE = Path(".dvc") / "tmp" / "facts"
# Files of drivers in /dev. Without any, no torch finds a GPU.
GPUS = ("nvidia*", "nvgpu*", "nvhost*", "nvmap", "kfd", "dxg")
Methods = dict[
    str, dict[str, tuple[str, dict[str, object]]]
]  # composition -> method -> module, defaults


class Later:
    """A module of `plugins` that is imported when a name of it is first used."""

    def __init__(self, name: str) -> None:
        self._name = f"fedml_noniid.plugins.{name}"

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


def read(root: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of settings that passed every check before.

    Empty if they are new, or if anything has changed.
    """
    return usercache.read(_place(root), _key(content)) or {}


def write(root: Path, content: Mapping[str, Any], compositions: Iterable[str]) -> None:
    """Stores the facts of settings that passed every check.

    `compositions`: those of their recipes.
    """
    if not (root / FILE).parent.is_dir() or not all(
        map(usercache.is_settled, stamps(CODE).values())
    ):
        return
    import torch

    found = {
        "methods": methods(compositions),
        "torch": torch.__version__,
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
    usercache.write(_place(root), _key(content), found)


def methods(compositions: Iterable[str]) -> Methods:
    """The methods of each composition, each with its module and the defaults of its
    hyper-parameters."""
    from fedml_noniid.plugins import recipes

    return {
        composition: {
            name: (recipes.METHODS[name].__module__, recipes.hyper_parameters(name))
            for name in recipes.parse(composition)
        }
        for composition in compositions
    }


def stamps(folders: Iterable[Path]) -> dict[str, usercache.Stamp]:
    """What changes when our code is edited, by file."""
    return {str(path): usercache.stamp(path) for folder in folders for path in folder.rglob("*.py")}


def may_have_gpu() -> bool:
    """Whether the system has a file of a GPU's driver."""
    return any(any(Path("/dev").glob(pattern)) for pattern in GPUS)


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


def _place(root: Path) -> str:
    return str((root / FILE).resolve())


def _key(content: Mapping[str, Any]) -> str:
    """A hash of all that the facts follow from."""
    torch = importlib.util.find_spec("torch")
    version = Path(str(torch and torch.origin)).with_name("version.py")
    about = (
        content,
        stamps(CODE),
        usercache.stamp(version),
        sys.version,
        of_cpu("flags"),
        os.environ.get("ATEN_CPU_CAPABILITY"),
    )
    return hashlib.sha256(json.dumps(about, sort_keys=True, default=str).encode()).hexdigest()
