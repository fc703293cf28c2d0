"""docs/threats.md: who can do what to a deployment, and by which test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "threats.md"
PARTIES = {"stranger", "network", "silo", "server", "study's owner", "operator"}


def rows(part: str) -> list[list[str]]:
    """(who, what, tests) of the table below a heading, without the table's own heading."""
    text = PAGE.read_text().partition(f"\n## {part}\n")[2].partition("\n## ")[0]
    found = re.findall(r"^\| (.*?) \| (.*) \| (.*) \|$", text, flags=re.MULTILINE)
    return [list(row) for row in found[1:]]


def exists(test: str) -> bool:
    """Whether a function `path::name` of our tests is there."""
    path, _, name = test.partition("::")
    if not name.startswith("test_") or not (TESTS / path).is_file():
        return False
    tree = ast.parse((TESTS / path).read_text())
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in tree.body)


def test_each_row_of_the_threat_model_names_tests_that_exist() -> None:
    every = [*rows("Promised"), *rows("Not promised")]
    named = {tuple(row): re.findall(r"`([^`]+)`", row[2]) for row in every}
    assert [row for row, tests in named.items() if not tests] == []
    assert [test for tests in named.values() for test in tests if not exists(test)] == []
    assert len(named) > 30


def test_the_threat_model_has_every_party() -> None:
    promised = {re.split(r"[,;]| that | and ", row[0])[0] for row in rows("Promised")}
    assert promised == PARTIES
    assert {row[0] for row in rows("Not promised")} >= PARTIES - {"study's owner"}


def test_a_name_that_is_no_test_is_found() -> None:
    assert exists("test_threats.py::test_a_name_that_is_no_test_is_found")
    assert not exists("test_threats.py::rows")
    assert not exists("test_threats.py::test_nothing")
    assert not exists("test_nowhere.py::test_nothing")
