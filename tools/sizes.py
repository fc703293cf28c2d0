"""Sizes that the project holds to: `python -m tools.sizes` prints them, and fails where one is exceeded.

A code line is a line of a Python file that is no import, docstring, comment or blank.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
# Code lines at most: of a file, or of all files of a folder.
CODE = {
    "plugins/core": 720,
    "plugins/baselines/scaffold.py": 35,
    "plugins/baselines/fedprox.py": 20,
    "plugins/baselines/fedrs.py": 20,
    "plugins/fnr/algorithm.py": 80,
    "plugins/fednnnn/algorithm.py": 120,
    "plugins/ccn/algorithm.py": 120,
    "plugins/fednlr/algorithm.py": 120,
    "plugins/rfedavg/algorithm.py": 120,
    "plugins/privacy": 60,
    "plugins/silo": 2150,
}
CONTRACT = "plugins/core/component.py"
MEMBERS, TYPES = 27, 14  # of `Component`; of its file


def code_lines(text: str) -> int:
    """The code lines of a Python file."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            first = node.body[0]
            lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def of(path: Path) -> int:
    """The code lines of a file, or of all files below a folder."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return sum(code_lines(file.read_text()) for file in files)


def members(text: str, name: str) -> int:
    """The members of a class: its annotated names and its functions."""
    (found,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name]
    return sum(isinstance(node, ast.AnnAssign | ast.FunctionDef) for node in found.body)


def types(text: str) -> int:
    """The classes that a file defines at its top."""
    return sum(isinstance(node, ast.ClassDef) for node in ast.parse(text).body)


def measured() -> Iterable[tuple[str, int, int]]:
    """(what, found, at most) of every size that is held."""
    contract = (ROOT / CONTRACT).read_text()
    yield "members of Component", members(contract, "Component"), MEMBERS
    yield f"types in {CONTRACT}", types(contract), TYPES
    for path, most in CODE.items():
        yield f"code lines of {path}", of(ROOT / path), most


def main() -> int:
    """Prints every size; 1 if one is exceeded."""
    sizes = list(measured())
    for what, found, most in sizes:
        sys.stdout.write(f"{found:5} of {most:4}  {what}{'' if found <= most else '   TOO LARGE'}\n")
    source = sum(of(ROOT / folder) for folder in ("plugins", "pipelines"))
    sys.stdout.write(f"{source:5}          code lines of plugins and pipelines together\n")
    return int(any(found > most for _, found, most in sizes))


if __name__ == "__main__":
    sys.exit(main())
