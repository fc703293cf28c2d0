"""docs/threats.md: who can do what to a deployment, and by which test."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "threats.md"
PARTIES = {"stranger", "network", "silo", "server", "study's owner", "operator"}


def rows(part: str) -> list[list[str]]:
    """(who, what, tests) of the table below a heading, without the table's own heading."""
    text = PAGE.read_text().partition(f"\n## {part}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| (.*?) \| (.*) \| (.*) \|$", text, flags=re.MULTILINE)
    return [list(row) for row in found[1:]]


@cache
def names_in(path: str) -> set[str]:
    """The names `path::name` of the tests in a file; none if there is no such file."""
    if not (TESTS / path).is_file():
        return set()
    tree = ast.parse((TESTS / path).read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    return {f"{path}::{name}" for name in names if name.startswith("test_")}


def test_each_row_of_the_threat_model_names_tests_that_exist() -> None:
    every = [*rows("Promised"), *rows("Not promised")]
    named = {tuple(row): re.findall(r"`([^`]+)`", row[2]) for row in every}
    assert [row for row, tests in named.items() if not tests] == []
    every_test = {test for tests in named.values() for test in tests}
    assert {test for test in every_test if test not in names_in(test.partition("::")[0])} == set()
    assert len(named) > 30


def test_the_threat_model_has_every_party() -> None:
    promised = {re.split(r"[,;]| that | and ", row[0])[0] for row in rows("Promised")}
    assert promised == PARTIES
    assert {row[0] for row in rows("Not promised")} >= PARTIES - {"study's owner"}
