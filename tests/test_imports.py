"""Imports point one way: what a package may know of the others."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

from fedml_noniid.plugins import extras

ROOT = Path(__file__).parents[1]
PACKAGE = "fedml_noniid"
# A room of the package itself knows itself, those before it, and all of `pipelines` and `plugins`.
OUTER = ("api", "contract", "cli")
METHODS = {"baselines", "fnr", "fednnnn", "ccn", "fednlr", "rfedavg"}
# What each room imports of the extras, at once or later. Every other room needs the base package
# only.
OF_EXTRAS = {
    "plugins/data": {"pyarrow"},
    "plugins/privacy": {"cryptography", "dp_accounting"},
    "plugins/kits": {"cryptography"},
    "plugins/silo": {"cryptography", "fedml", "grpc", "yaml"},
    "plugins/secure": {"cryptography"},
    "plugins/site": {"cryptography", "yaml"},
    "pipelines/cluster": {"cryptography", "dask", "distributed"},
    "pipelines/reporting": {"jinja2", "markdown_it"},
    "pipelines/tracking": {"mlflow"},
    "pipelines/tools": {"dvc", "jinja2", "tabulate"},
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


FILES = [*files("plugins"), *files("pipelines"), *files(PACKAGE)]
PACKAGES = {parts[1] for parts, _ in files("plugins")} - {"__init__"}
BESIDE = ("benchmarks", "papers", "tests", "tools")  # they are in no wheel


def listed(top: str, rooms: set[str]) -> dict[str, set[str]]:
    """Room of `top` -> which of these rooms it may import beside itself, by the page of the
    architecture."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.partition(f"| may import, of `{top}` |")[2].partition("\n\n")[0]
    found = {}
    for names, words in re.findall(r"^\| (`.*?`) \| .* \| (.*?)(?:;.*)? \|$", table, re.MULTILINE):
        may = set(re.findall(r"\w+", words))
        may = rooms - may if "all" in may else may | (METHODS if "methods" in may else set())
        found |= dict.fromkeys(re.findall(rf"`(?:{top}/)?(\w+)(?:\.py)?`", names), may & rooms)
    return {room: may for room, may in found.items() if room in rooms}


ALLOWED = listed("plugins", PACKAGES)
ROOMS = listed("pipelines", {parts[1] for parts, _ in files("pipelines")})


def room_of(module: str) -> str:
    """`plugins/core` of plugins.core.trees, `api` of api.data, `torch` of torch.nn."""
    parts = module.split(".")
    return "/".join(parts[:2] if parts[0] in ("plugins", "pipelines") else parts[:1])


def allowed(parts: tuple[str, ...]) -> set[str]:
    """The rooms that a file may import, by the parts of its module's name."""
    top, room, name = parts[0], parts[1], parts[-1]
    if room in METHODS and name == "pair":
        return {f"plugins/{room}", "plugins/silo"}
    if room in METHODS and name == "__init__":  # it names the pair
        return {f"plugins/{room}", "plugins/silo", *(f"plugins/{one}" for one in ALLOWED[room])}
    if top == "plugins":
        return {f"plugins/{one}" for one in ALLOWED[room] | {room}}
    before = ROOMS[room] | {room, "edge"} if top == "pipelines" else ROOMS
    outer = OUTER[: OUTER.index(room) + 1] if room in OUTER else ()
    within = {f"plugins/{one}" for one in PACKAGES} | {f"pipelines/{one}" for one in before}
    return within | {*outer}


def test_a_file_imports_only_what_it_may() -> None:
    """Also in functions. What it imports must be a room of the page's tables."""
    assert set(ALLOWED) == PACKAGES
    for parts, path in FILES:
        if parts[1] not in ("__init__", "__main__"):
            ours = {room_of(name) for name in imported(path)}
            ours = {one for one in ours if "/" in one or one in (*OUTER, *BESIDE)}
            assert ours <= allowed(parts), path


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
    assert not in_a_circle({room: of - METHODS for room, of in ALLOWED.items() if room != "silo"})
    names = {".".join(parts).removesuffix(".__init__"): path for parts, path in FILES}
    found = {
        name: {of if of in names else of.rpartition(".")[0] for of in imported(path, inside=False)}
        for name, path in names.items()
    }
    assert not in_a_circle(found)


def test_pictures_of_papers_use_public_names() -> None:
    for parts, path in files("papers"):
        for name in imported(path):
            private = any(part.startswith("_") for part in name.split(".") if part != "__future__")
            assert not private and name.split(".")[0] not in ("tests", "tools"), (parts, name)


def test_only_these_rooms_import_packages_of_the_extras() -> None:
    """Each extra's packages, so mlflow in tracking and fedml in the silos."""
    found: dict[str, set[str]] = {}
    known = {module for modules in extras.MODULES.values() for module in modules}
    for parts, path in FILES:
        room = "/".join(parts[:2])
        found.setdefault(room, set()).update(
            {name.split(".")[0] for name in imported(path)} & known
        )
    assert {room: names for room, names in found.items() if names} == OF_EXTRAS
    assert known == set[str]().union(*OF_EXTRAS.values())
