"""Imports point one way: what a package may know of the others. Names say what things are."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from fedml_noniid import extras

ROOT = Path(__file__).parents[1]
PACKAGE = "fedml_noniid"
# A door of the package knows itself, those before it, and all other rooms.
OUTER = ("api", "contract", "cli")
METHODS = {"baselines", "fnr", "fednnnn", "ccn", "fednlr", "rfedavg"}
# What each room imports of the extras, at once or later. Every other room needs the base package
# only.
OF_EXTRAS = {
    "data": {"openpyxl", "pyarrow"},
    "privacy": {"cryptography", "dp_accounting"},
    "credentials": {"cryptography"},
    "deploy": {"cryptography", "fedml", "grpc", "yaml"},
    "engines": {"wandb"},
    "governance": {"cryptography", "yaml"},
    "pipelines/cluster": {"cryptography", "dask", "distributed"},
    "pipelines/reporting": {"jinja2", "markdown_it"},
    "pipelines/tracking": {"mlflow"},
    "pipelines/verbs": {"dvc", "jinja2", "tabulate"},
    "cli": {"typer"},
}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def imported(path: Path, inside: bool = True) -> tuple[str, ...]:
    """The modules that a file names in its imports, ours without the package's name.

    `inside`: also in those that run later or never.
    """
    return tuple(name.removeprefix(f"{PACKAGE}.") for name in _imported(path, inside))


def _imported(path: Path, inside: bool) -> Iterator[str]:
    tree = parsed(path)
    for node in ast.walk(tree) if inside else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(package: str) -> list[tuple[tuple[str, ...], Path]]:
    """Every file of a package: the parts of its module's name, ours without the package's, and its
    path. Links are not followed."""
    return [
        (
            path.relative_to(ROOT / package if package == PACKAGE else ROOT).with_suffix("").parts,
            path,
        )
        for path in sorted((ROOT / package).rglob("*.py"))
    ]


FILES = [*files("plugins"), *files("pipelines"), *files(PACKAGE)]
BESIDE = ("benchmarks", "research", "tests", "tools")  # they are in no wheel


def room_of(module: str) -> str:
    """`core` of core.trees, `fnr` of plugins.fnr.pair, `pipelines/stages`, `torch` of torch.nn."""
    parts = module.split(".")
    if parts[0] == "plugins":
        return parts[1] if len(parts) > 1 else parts[0]
    return "/".join(parts[:2] if parts[0] == "pipelines" else parts[:1])


def listed(heading: str, rooms: set[str]) -> dict[str, set[str]]:
    """Room -> which of these rooms it may import beside itself, by a table of the page of the
    architecture."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition(f"| {heading} |\n")[2].partition("\n\n")[0]
    found: dict[str, set[str]] = {}
    for names, words in re.findall(r"^\| (`.*?`) \| .* \| (.*?)(?:;.*)? \|$", table, re.MULTILINE):
        may = set(re.findall(r"\w+", words))
        may = rooms - may if "all" in may else may | (METHODS if "methods" in may else set())
        found |= dict.fromkeys(re.findall(r"`(?:\w+/)?(\w+)(?:\.py)?`", names), may & rooms)
    return {room: may for room, may in found.items() if room in rooms}


FACES = ("__init__", "__main__")
PACKAGES = {
    room_of(".".join(parts))
    for parts, _ in FILES
    if parts[0] not in (*OUTER, *FACES, "pipelines") and parts != ("plugins", "__init__")
}
ALLOWED = listed("may import", PACKAGES)
ROOMS = listed("may import, of `pipelines`", {parts[1] for parts, _ in files("pipelines")})


def allowed(parts: tuple[str, ...]) -> set[str]:
    """The rooms that a file may import, by the parts of its module's name."""
    top, name, room = parts[0], parts[-1], room_of(".".join(parts))
    if room in METHODS and name == "pair":
        return {room, "deploy"}
    if top == "pipelines":
        of = room.removeprefix("pipelines/")
        return PACKAGES | {f"pipelines/{one}" for one in ROOMS[of] | {of, "edge"}}
    if room in OUTER:
        before = OUTER[: OUTER.index(room) + 1]
        return PACKAGES | {f"pipelines/{one}" for one in ROOMS} | {*before}
    return ALLOWED[room] | {room}


def test_a_file_imports_only_what_it_may() -> None:
    """Also in functions. What it imports must be a room of the page's tables."""
    assert set(ALLOWED) == PACKAGES
    ours = {*PACKAGES, *OUTER, *BESIDE}
    for parts, path in FILES:
        if parts[-1] not in FACES or len(parts) > 2:
            found = {room_of(name) for name in imported(path)}
            found = {one for one in found if one in ours or one.startswith("pipelines/")}
            assert found <= allowed(parts), path


def in_a_circle(imports: dict[str, set[str]]) -> set[str]:
    """What is left after everything is taken away, again and again, that imports nothing that is
    left."""
    left = {name: found & imports.keys() - {name} for name, found in imports.items()}
    while free := {name for name, found in left.items() if not found & left.keys()}:
        left = {name: found for name, found in left.items() if name not in free}
    return set(left)


def test_rooms_and_files_import_each_other_in_no_circle() -> None:
    """Methods may take another's file; what a function imports later may lead back."""
    assert in_a_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"a", "b", "c"}
    assert not in_a_circle({room: of - METHODS for room, of in ALLOWED.items() if room != "deploy"})
    names = {".".join(parts).removesuffix(".__init__"): path for parts, path in FILES}
    found = {
        name: {of if of in names else of.rpartition(".")[0] for of in imported(path, inside=False)}
        for name, path in names.items()
    }
    assert not in_a_circle(found)


def test_research_uses_public_names() -> None:
    for parts, path in files("research"):
        for name in imported(path):
            private = any(part.startswith("_") for part in name.split(".") if part != "__future__")
            assert not private and name.split(".")[0] not in ("tests", "tools"), (parts, name)


def test_only_these_rooms_import_packages_of_the_extras() -> None:
    """Each extra's packages, so mlflow in tracking and fedml in the silos."""
    found: dict[str, set[str]] = {}
    known = {module for modules in extras.MODULES.values() for module in modules}
    for parts, path in FILES:
        found.setdefault(room_of(".".join(parts)), set()).update(
            {name.split(".")[0] for name in imported(path)} & known
        )
    assert {room: names for room, names in found.items() if names} == OF_EXTRAS
    by_torch = {"tensorboard"}  # torch.utils imports it
    assert known - by_torch == set[str]().union(*OF_EXTRAS.values())


NO_NAMES = {"found", "given", "of", "one", "place", "where", "words", "laid", "told"}
BINDS = {ast.Name: "id", ast.arg: "arg", ast.FunctionDef: "name", ast.ClassDef: "name"}


def bound(path: Path) -> set[str]:
    """The names that a file gives to variables, arguments, functions and classes."""
    nodes = [node for node in ast.walk(parsed(path)) if type(node) in BINDS]
    made = [node for node in nodes if not isinstance(getattr(node, "ctx", None), ast.Load)]
    return {getattr(node, BINDS[type(node)]) for node in made}


def test_a_name_says_what_a_thing_is() -> None:
    names = {(path.name, name) for _, path in FILES for name in bound(path) & NO_NAMES}
    assert not names
