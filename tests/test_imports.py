"""Imports point one way: what a package may know of the others."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedml_noniid.plugins import extras

ROOT = Path(__file__).parents[1]
PACKAGE = "fedml_noniid"
# A room of pipelines knows itself and those before it. edge.py is the edge of every process.
ROOMS = ("edge", "experiment", "reporting", "tracking", "stages", "papers", "tools")
# A room of the package itself knows itself, those before it, and all of `pipelines` and `plugins`.
OUTER = ("api", "cli")
METHODS = {"baselines", "fnr", "fednnnn", "ccn", "fednlr", "rfedavg"}
EVERYTHING = {
    "core",
    "data",
    "models",
    "engines",
    "recipes",
    "privacy",
    "silo",
    "extras",
} | METHODS
EVERYTHING |= {"own_code", "rates", "simulate"}
# Beside itself, what of `plugins` a package imports.
ALLOWED = {
    "core": set[str](),
    "extras": {"core"},
    "data": {"core", "extras"},
    "models": {"core", "data"},
    "own_code": {"core"},
    "rates": {"core", "own_code"},
    "engines": {"core", "data", "models", "own_code", "rates"},  # an engine is handed an algorithm
    "recipes": {"core"} | METHODS,
    "simulate": {"core", "engines", "recipes"},
    "privacy": {"core", "data"},
    "silo": EVERYTHING,
    **{method: {"core"} | METHODS for method in METHODS},
}
# What each room imports of the extras, at once or later. Every other room needs the base package
# only.
OF_EXTRAS = {
    "plugins/data": {"pyarrow"},
    "plugins/privacy": {"cryptography"},
    "plugins/silo": {"cryptography", "fedml", "grpc", "yaml"},
    "pipelines/reporting": {"jinja2", "markdown_it"},
    "pipelines/tracking": {"mlflow"},
    "pipelines/tools": {"jinja2", "tabulate"},
    f"{PACKAGE}/cli": {"typer"},
}


@functools.cache
def imported(path: Path, inside: bool = True) -> tuple[str, ...]:
    """The modules that a file names in its imports, ours from `plugins` or `pipelines` on.

    `inside`: also in those that run later or never.
    """
    return tuple(name.removeprefix(f"{PACKAGE}.") for name in _imported(path, inside))


def _imported(path: Path, inside: bool) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if inside else tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files(package: str) -> list[tuple[tuple[str, ...], Path]]:
    """Every file of a package: the parts of its module's name, and its path."""
    return [
        (path.relative_to(ROOT).with_suffix("").parts, path)
        for path in sorted((ROOT / package).rglob("*.py"))
    ]


FILES, PIPELINES = files("plugins"), files("pipelines")
PACKAGES = sorted({parts[1] for parts, _ in FILES} - {"__init__"})


def direct(pairs: bool = True) -> dict[str, set[str]]:
    """What of `plugins` each package imports.

    `pairs`: whether the FedML pairs of method packages count.
    """
    found: dict[str, set[str]] = {package: set() for package in PACKAGES}
    for parts, path in FILES:
        if parts[1] == "__init__" or (
            not pairs and parts[1] in METHODS and parts[-1] in ("pair", "__init__")
        ):
            continue
        names = [name.split(".") for name in imported(path)]
        found[parts[1]] |= {name[1] for name in names if name[0] == "plugins" and len(name) > 1}
    return found


def test_every_package_is_known_here() -> None:
    assert set(PACKAGES) == set(ALLOWED)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_what_it_may(package: str) -> None:
    assert direct(pairs=False)[package] <= ALLOWED[package] | {package}


def test_only_the_pairs_of_methods_know_the_silos() -> None:
    """What else such a file may import is its own package."""
    for parts, path in FILES:
        if parts[1] in METHODS and parts[-1] == "pair":
            names = {name.split(".")[1] for name in imported(path) if name.startswith("plugins.")}
            assert names <= {"silo", parts[1]}, path


def test_no_plugin_imports_a_pipeline() -> None:
    for _, path in FILES:
        assert not any(
            name.split(".")[0] in (*OUTER, "pipelines", "tests", "benchmarks")
            for name in imported(path)
        ), path


def in_a_circle(imports: dict[str, set[str]]) -> set[str]:
    """What is left after everything is taken away, again and again, that imports nothing that is
    left."""
    left = {name: found & imports.keys() - {name} for name, found in imports.items()}
    while free := {name for name, found in left.items() if not found & left.keys()}:
        left = {name: found for name, found in left.items() if name not in free}
    return set(left)


def test_a_circle_is_found() -> None:
    assert in_a_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == {"a", "b", "c"}
    assert not in_a_circle({"a": {"b"}, "b": {"c"}, "c": {"c"}})


def test_packages_import_each_other_in_no_circle() -> None:
    """Methods count as one: a combination may take another's file."""
    found = direct(pairs=False)
    together = {package: of for package, of in found.items() if package not in METHODS}
    together |= {"methods": set[str]().union(*(found[method] for method in METHODS)) - METHODS}
    together = {
        package: of - METHODS | ({"methods"} if of & METHODS else set())
        for package, of in together.items()
    }
    assert not in_a_circle(together)


@pytest.mark.parametrize("of", ["plugins", "pipelines"])
def test_files_import_each_other_in_no_circle(of: str) -> None:
    """At once; what a function imports later may lead back."""
    names = {".".join(parts).removesuffix(".__init__"): path for parts, path in files(of)}
    assert not in_a_circle(
        {
            name: {
                of if of in names else of.rpartition(".")[0] for of in imported(path, inside=False)
            }
            for name, path in names.items()
        }
    )


def rooms(path: Path) -> set[str]:
    """The rooms of pipelines that a file imports, also later."""
    names = [name.split(".") for name in imported(path)]
    return {name[1] for name in names if name[0] == "pipelines" and len(name) > 1}


def test_every_room_is_known_here() -> None:
    assert {parts[1] for parts, _ in PIPELINES} == {*ROOMS, "__init__"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_those_before_it(room: str) -> None:
    before = set(ROOMS[: ROOMS.index(room) + 1])
    for parts, path in PIPELINES:
        if parts[1] == room:
            assert rooms(path) <= before, path


@pytest.mark.parametrize("room", OUTER)
def test_an_outer_room_imports_only_those_before_it(room: str) -> None:
    """Nothing within imports them.

    Only verbs that need a checkout import the benchmarks, and they check for it.
    """
    later = {*OUTER[OUTER.index(room) + 1 :], "tests", "tools"} | (
        {"benchmarks"} if room == "api" else set()
    )
    for _, path in files(f"{PACKAGE}/{room}"):
        assert not {name.split(".")[0] for name in imported(path)} & later, path
    for _, path in PIPELINES:
        assert room not in {name.split(".")[0] for name in imported(path)}, path


def test_pictures_of_papers_use_public_names_and_nothing_within_imports_them() -> None:
    """They leave the wheel, so no file of it may need them."""
    for parts, path in files("papers"):
        for name in imported(path):
            private = any(part.startswith("_") for part in name.split(".") if part != "__future__")
            assert not private and name.split(".")[0] not in ("tests", "tools"), (parts, name)
    for _, path in [*FILES, *PIPELINES, *files(PACKAGE)]:
        assert "papers" not in {name.split(".")[0] for name in imported(path)}, path


def test_only_these_rooms_import_packages_of_the_extras() -> None:
    """Each extra's packages, so mlflow in tracking and fedml in the silos."""
    found: dict[str, set[str]] = {}
    known = {module for modules in extras.MODULES.values() for module in modules}
    for parts, path in [*FILES, *PIPELINES, *files(PACKAGE)]:
        room = "/".join(parts[:2])
        found.setdefault(room, set()).update(
            {name.split(".")[0] for name in imported(path)} & known
        )
    assert {room: names for room, names in found.items() if names} == OF_EXTRAS
    assert known - {"dvc"} == set[str]().union(*OF_EXTRAS.values()), "DVC is a program of its own"
