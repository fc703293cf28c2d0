"""A package of a stranger with one method, as it lies beside ours when it is installed."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

# FedProx's term under another name: the runs must have FedProx's bits.
METHOD = """\
from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import Client, Component, Exclusive
from fedml_noniid.core.options import NonNegative
from fedml_noniid.core.trees import Params, tree_map


@dataclass(frozen=True)
class FedX(Component):
    \"\"\"Pulls the local model towards the received one.\"\"\"

    name: ClassVar[str] = "fedx"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.PROXIMAL})

    mu: NonNegative = 0.1

    def gradient_term(self, w: Params, client: Client) -> Params:
        return tree_map(lambda w, w_t: self.mu * (w - w_t), w, client.params)
"""


def write(folder: Path, package: str, source: str = METHOD) -> Path:
    """Writes the package, with its method in `fedx.py`. Returns that file."""
    place = folder / package
    place.mkdir(parents=True)
    (place / "__init__.py").write_text("")
    (place / "fedx.py").write_text(source)
    return place / "fedx.py"


def sha256_of(folder: Path) -> str:
    """As `LC_ALL=C; sha256sum *.py | sha256sum` in the folder."""
    files = sorted(folder.glob("*.py"))
    said = [f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}\n" for one in files]
    return hashlib.sha256("".join(said).encode()).hexdigest()


def forget(package: str) -> None:
    """Lets the next import read the files, as in a process that starts."""
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def advertise(folder: Path, distribution: str, **methods: str) -> None:
    """Writes what an installer leaves: the entry points of a distribution, name -> class."""
    info = folder / f"{distribution.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    lines = [f"{name} = {place}" for name, place in methods.items()]
    (info / "entry_points.txt").write_text("\n".join(["[fedml_noniid.methods]", *lines, ""]))
