"""What a result depends on: the code of its own methods and of the simulation, found by what files import."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedml_noniid.pipelines.experiment import config, provenance, usercache
from fedml_noniid.plugins import recipes
from tests.pipelines.small import ROOT

SHARED = {
    "core/algorithm.py", "core/randomness.py", "engines/simulation.py", "engines/vectorized.py", "models/layers.py",
    "models/recurrent.py", "data/batches.py", "data/noise.py", "data/streams.py", "recipes.py",
}  # fmt: skip


def files(recipe: str) -> set[str]:
    """The files of `plugins` that a training of the recipe depends on."""
    found = provenance.files("fedml_noniid.pipelines.experiment.training", *provenance._methods(recipe))
    return {path.relative_to(provenance.ROOT).as_posix().removeprefix("fedml_noniid/plugins/") for path in found}


@pytest.mark.parametrize(
    ("recipe", "own"),
    [
        ("fedavg", set()),
        ("scaffold", {"baselines/__init__.py", "baselines/scaffold.py"}),
        ("fnr", {"fnr/__init__.py", "fnr/algorithm.py", "fnr/recorded.py"}),
        ("fedftg", {"baselines/__init__.py", "baselines/fedftg.py", "baselines/generators.py"}),
        ("rfedavg_plus", {"rfedavg/__init__.py", "rfedavg/algorithm.py"}),
    ],
)
def test_a_recipe_depends_on_its_own_methods_only(recipe: str, own: set[str]) -> None:
    found = files(recipe)
    assert found >= SHARED
    methods = {
        name for name in found if name.split("/")[0] in ("baselines", "fnr", "ccn", "fednlr", "fednnnn", "rfedavg")
    }
    assert methods == own
    assert not [name for name in found if name.startswith(("silo/", "data/readers", "data/partitions"))]


def test_nothing_that_a_training_imports_is_left_out() -> None:
    """Every module of ours that is loaded with the methods is a dependency of some recipe, or no part of training."""
    every = set().union(*(files(name) for name in ("fedavg", *recipes.METHODS)))
    loaded = {
        module.__file__ for name, module in sys.modules.items() if name.startswith("plugins.") and module.__file__
    }
    rest = {name for name in (str(file).split("/plugins/")[1] for file in loaded) if name not in every}
    outside = ("silo/", "data/readers/", "data/partitions/", "data/datasets.py", "data/splits.py", "data/statistics.py",
               "data/alike.py", "settings.py")  # fmt: skip
    assert {name for name in rest if not name.startswith(outside) and not name.endswith("pair.py")} == set()


def test_a_cpu_of_another_maker_is_another_kind_of_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two makers' CPUs with the same instructions were measured to give other bits."""
    settings = config.load(ROOT)
    found = []
    for vendor in ("GenuineIntel", "AuthenticAMD"):
        monkeypatch.setattr(provenance, "_of_cpu", {"vendor_id": vendor}.__getitem__)
        found.append((provenance.machine_kind(settings), provenance.of_training(settings, settings.units()[0])))
    (first, one), (second, other) = found
    assert first | {"vendor": "AuthenticAMD"} == second and one != other


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that was written long ago, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "module.py"
    path.write_text("x = 1\n")
    os.utime(path, (0, 0))
    monkeypatch.setattr(usercache, "SETTLED_NS", 0)
    return path


def found(path: Path) -> provenance._Source:
    """As a new process finds it, and stores it."""
    sources = provenance._Sources()
    source = sources[path]
    sources.save()
    return source


def test_code_is_parsed_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = found(file)
    monkeypatch.setattr(provenance, "_of_file", lambda path: pytest.fail("parsed again"))
    assert found(file) == first
    monkeypatch.undo()
    assert (file.parents[0] / "cache" / "fedml-noniid" / "code.json").stat().st_mode & 0o077 == 0


def in_place(path: Path) -> None:
    path.write_text("x = 2\n")  # of the same size
    os.utime(path, (0, 0))


def replaced(path: Path) -> None:
    fresh = path.with_name("fresh")
    fresh.write_text("x = 2\n")
    os.utime(fresh, (0, 0))
    fresh.replace(path)


@pytest.mark.parametrize("edit", [in_place, replaced])
def test_an_edit_that_sets_the_clock_back_is_noticed(file: Path, edit: Callable[[Path], None]) -> None:
    first = found(file)
    edit(file)
    assert found(file) == provenance._of_file(file) != first


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-20],
        lambda text: text.replace("module.py", "module.pi"),
        lambda text: text + " ",
    ],
)
def test_a_damaged_cache_costs_time_only(file: Path, damage: Callable[[str], str]) -> None:
    wanted, kept = found(file), usercache.folder() / "code.json"
    damaged = damage(kept.read_text())
    kept.write_text(damaged)
    assert found(file) == wanted
    assert kept.read_text() != damaged


def test_a_file_of_the_last_two_seconds_is_not_stored(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usercache, "SETTLED_NS", 10**12)
    found(file)
    assert not usercache.folder().exists()


def test_a_cache_that_cannot_be_written_is_no_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # is no folder
    assert found(file) == provenance._of_file(file)
