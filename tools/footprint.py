"""What each extra brings: `python -m tools.footprint` prints packages and megabytes, in the present
environment."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

OURS = "fedml-noniid"
EXTRAS = ("", "pipeline", "cluster", "silo", "pipeline,silo")


def closure(requirements: Iterable[str]) -> dict[str, Distribution]:
    """The installed packages that requirements bring, directly or not, by name."""
    packages: dict[str, Distribution] = {}
    done: set[tuple[str, str]] = set()
    todo = [Requirement(line) for line in requirements]
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        packages[name] = package = distribution(name)
        for extra in {"", *wanted.extras} - {handled for known, handled in done if known == name}:
            done.add((name, extra))
            further = [Requirement(line) for line in package.requires or ()]
            todo += [r for r in further if r.marker is None or r.marker.evaluate({"extra": extra})]
    return packages


def megabytes(package: Distribution) -> float:
    """The size of a package's files on disk, without compiled modules."""
    paths = [
        Path(str(package.locate_file(file)))
        for file in package.files or ()
        if file.suffix != ".pyc"
    ]
    return sum(path.stat().st_size for path in paths if path.is_file()) / 1e6


def table() -> str:
    """The rows of the extras, in Markdown."""
    lines = ["| install | packages | MB | of these for PyTorch (MB) |", "|---|---|---|---|"]
    torch = closure(["torch"])
    for extra in EXTRAS:
        name = f"{OURS}[{extra}]" if extra else OURS
        packages = {key: package for key, package in closure([name]).items() if key != OURS}
        sizes = {key: megabytes(package) for key, package in packages.items()}
        of_torch = sum(size for key, size in sizes.items() if key in torch)
        lines.append(
            f"| `{name}` | {len(packages)} | {sum(sizes.values()):,.0f} | {of_torch:,.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
