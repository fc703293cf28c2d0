"""Sizes that the project holds to: `python -m tools.sizes` prints them, and fails where one is
exceeded.

Statements are counted, not lines: a line can be made wide. Imports and docstrings do not count.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Statements at most: of a file, or of all files of a folder.
MOST = {
    "plugins/core": 796,
    "plugins/baselines/scaffold.py": 30,
    "plugins/baselines/fedprox.py": 15,
    "plugins/baselines/fedrs.py": 15,
    "plugins/fnr/algorithm.py": 70,
    "plugins/fednnnn/algorithm.py": 90,
    "plugins/ccn/algorithm.py": 90,
    "plugins/fednlr/algorithm.py": 90,
    "plugins/rfedavg/algorithm.py": 90,
    "plugins/privacy": 49,
    "plugins/silo": 1872,
}
CONTRACT = "plugins/core/component.py"
MEMBERS, TYPES = 27, 14  # of `Component`; of its file


def statements(text: str) -> int:
    """The statements of a Python file."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    return sum(
        not isinstance(node, ast.Import | ast.ImportFrom) and not _is_text(node) for node in nodes
    )


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def of(path: Path) -> int:
    """The statements of a file, or of all files below a folder."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return sum(statements(file.read_text()) for file in files)


def members(text: str, name: str) -> int:
    """The members of a class: its annotated names and its functions."""
    (found,) = [
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return sum(isinstance(node, ast.AnnAssign | ast.FunctionDef) for node in found.body)


def types(text: str) -> int:
    """The classes that a file defines at its top."""
    return sum(isinstance(node, ast.ClassDef) for node in ast.parse(text).body)


def measured() -> Iterable[tuple[str, int, int]]:
    """(what, found, at most) of every size that is held."""
    contract = (ROOT / CONTRACT).read_text()
    yield "members of Component", members(contract, "Component"), MEMBERS
    yield f"types in {CONTRACT}", types(contract), TYPES
    for path, most in MOST.items():
        yield f"statements of {path}", of(ROOT / path), most


def main() -> int:
    """Prints every size; 1 if one is exceeded."""
    sizes = list(measured())
    for what, found, most in sizes:
        sys.stdout.write(
            f"{found:5} of {most:4}  {what}{'' if found <= most else '   TOO LARGE'}\n"
        )
    source = sum(of(ROOT / folder) for folder in ("plugins", "pipelines"))
    sys.stdout.write(f"{source:5}          statements of plugins and pipelines together\n")
    return int(any(found > most for _, found, most in sizes))


if __name__ == "__main__":
    sys.exit(main())
