"""A method of a stranger's package: found by entry point, registration and dotted path; or refused
in a line."""

from __future__ import annotations

import importlib
import json
import linecache
import sys
import types
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import fedml_noniid as nd
from fedml_noniid import foreign
from fedml_noniid.core.component import MODELS, Setting
from fedml_noniid.core.errors import UserError
from fedml_noniid.engines.personal import PERSONAL
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.plugins import registry
from tests import federation, own_package

FEDX = {"mu": 0.3}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that Python finds packages in."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - modules:
        if name.startswith("stranger"):
            del sys.modules[name]


def test_its_three_ways_in_have_the_bits_of_the_same_method_of_ours(place: Path) -> None:
    """Alone and composed, with hyper-parameters by the method's name, in processes too."""
    own_package.write(place, "stranger")
    own_package.advertise(place, "stranger-methods", fedx="stranger.fedx:FedX")
    ours = federation.run("fedprox+scaffold", {"fedprox": FEDX})
    assert "stranger" not in sys.modules
    assert "fedx" in registry.names() and "stranger" not in sys.modules, "named, not imported"
    for recipe in ("scaffold+fedx", "stranger.fedx.FedX+scaffold", "scaffold + stranger.fedx:FedX"):
        foreign._known.clear()
        assert set(registry.parse(recipe)) == {"scaffold", "fedx"}
        for workers in (1, 2):
            found = federation.run(recipe, {"fedx": FEDX}, workers=workers)
            assert federation.equal_models(found, ours)
    plain = federation.run("fedavg")
    assert not federation.equal_models(federation.run("fedx", {"fedx": FEDX}), plain)
    foreign._known.clear()
    kind = importlib.import_module("stranger.fedx").FedX
    assert nd.register(kind) is kind
    assert nd.register(type("FedX", (kind,), {**vars(kind)})).name == "fedx", "a cell, run again"


def test_hyper_parameters_and_names_of_it_are_checked(place: Path) -> None:
    own_package.write(place, "stranger")
    how: dict[str, Any] = {"partition": "iid", "clients": 2, "rounds": 1, "progress": False}
    with pytest.raises(UserError, match=r"run: fedx\.mu = -1 is refused"):
        nd.run("stranger.fedx.FedX", nd.load("digits"), fedx={"mu": -1}, **how)
    with pytest.raises(UserError, match=r"named twice"):
        nd.sweep(["stranger.fedx.FedX", "fedx"], nd.load("digits"), **how)


def test_a_record_has_the_hash_of_the_code_that_ran(place: Path, tmp_path: Path) -> None:
    """The user has imported the module himself. Its file is edited before the first run, and after
    one."""
    file = own_package.write(place, "stranger")
    nd.register(importlib.import_module("stranger.fedx").FedX)
    split = nd.partition(nd.load("digits"), "iid", clients=2)
    for edit in ("0.50", "0.25000"):
        file.write_text(changed("= 0.1", f"= {edit}"))
        refused = r"run: the source of stranger was changed .* importlib\.reload\(stranger\.fedx\)"
        with pytest.raises(UserError, match=refused):
            nd.run("fedx", split, rounds=1, progress=False)
        importlib.reload(sys.modules["stranger.fedx"])
        result = nd.run("fedx", split, rounds=1, progress=False, folder=tmp_path / edit)
        (record,) = (tmp_path / edit).rglob("run.json")
        sha = own_package.sha256_of(file.parent)
        assert json.loads(record.read_text())["params"]["own_code"] == {"fedx": sha}
        same = nd.run("fedprox", split, rounds=1, progress=False, fedprox={"mu": float(edit)})
        assert result.rounds["test_loss"].tolist() == same.rounds["test_loss"].tolist()


def test_a_reload_of_one_module_leaves_old_objects_in_others(place: Path) -> None:
    """A name that was imported from a module stays as it was; so does a parent."""
    own_package.write(place, "stranger_base")
    source = "from stranger_base.fedx import FedX\nfrom stranger import scale\n"
    child = "@dataclass(frozen=True)\nclass FedZ(FedX):\n    name = 'fedz'\n"
    own_package.write(place, "stranger", f"{source}from dataclasses import dataclass\n{child}")
    scale = place / "stranger" / "scale.py"
    scale.write_text("A = 1\n")
    before = registry.own_code("stranger.fedx:FedZ")
    scale.write_text("A = 1.5\n")
    importlib.reload(sys.modules["stranger.scale"])
    with pytest.raises(UserError, match=r"importlib\.reload\(stranger\.fedx\)"):
        registry.own_code("fedz")
    importlib.reload(sys.modules["stranger.fedx"])
    after = registry.own_code("fedz")
    assert after != before
    importlib.reload(sys.modules["stranger_base.fedx"])
    with pytest.raises(
        UserError, match=r"source of stranger_base .* importlib\.reload\(stranger\.fedx\)"
    ):
        registry.own_code("fedz")
    importlib.reload(sys.modules["stranger.fedx"])
    assert registry.own_code("fedz") == after


def changed(old: str, new: str) -> str:
    assert old in own_package.METHOD
    return own_package.METHOD.replace(old, new)


REFUSED = {
    "no class": ("x = 1\n", "stranger.fedx.FedX' can't be imported, AttributeError"),
    "syntax": ("x = = 1\n", r"can't be imported, .*SyntaxError"),
    "fails": ("\nraise KeyError('k')\n", r"can't be imported, .*fedx\.py, line 2: KeyError: 'k'"),
    "no component": ("class FedX: ...\n", "is no subclass of Component"),
    "no name": (changed('    name: ClassVar[str] = "fedx"\n', ""), "has no name; add `name"),
    "no word": (changed('"fedx"', '"fed x"'), "name = 'fed x' is refused; allowed: letters"),
    "reserved": (changed('"fedx"', '"train"'), "name = 'train' is refused; allowed: all but"),
    # A client's memory and an Ask have names beside those of methods.
    "own": (changed('"fedx"', '"own"'), "name = 'own' is refused; allowed: all but"),
    "models": (changed('"fedx"', '"models"'), "name = 'models' is refused; allowed: all but"),
    "no dataclass": (changed("@dataclass(frozen=True)\n", ""), "is no frozen dataclass"),
    "no default": (changed("NonNegative = 0.1", "NonNegative"), "'mu' has no default"),
    "taken by us": (changed('"fedx"', '"fedprox"'), "'fedprox' is taken by package fedml-noniid"),
    "taken class": (
        changed("class FedX", "class Scaffold") + "FedX = Scaffold\n",
        "the name of its class, Scaffold, is taken by method 'scaffold'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_class_that_is_no_method_is_refused_in_a_line(place: Path, case: str) -> None:
    source, words = REFUSED[case]
    own_package.write(place, "stranger", source)
    with pytest.raises(UserError, match=words) as error:
        registry.build("scaffold+stranger.fedx.FedX", {}, Setting(4, 2))
    assert len(str(error.value).splitlines()) == 1
    assert str(error.value).startswith("recipe 'scaffold+stranger.fedx.FedX': method ")


def test_a_name_that_another_package_has_is_refused(place: Path) -> None:
    for package in ("stranger", "stranger2"):
        own_package.write(place, package)
    with pytest.raises(UserError, match=r"'fedx' is taken by stranger\.fedx\.FedX; choose another"):
        registry.parse("stranger.fedx.FedX+stranger2.fedx.FedX")
    foreign._known.clear()
    foreign._entry_points.cache_clear()
    own_package.advertise(place, "one-package", fedx="stranger.fedx:FedX", fedprox="no.where:No")
    with pytest.raises(UserError, match="'fedx' is taken by package one-package; choose another"):
        registry.parse("stranger2.fedx.FedX")
    assert registry.parse("stranger.fedx.FedX") == ("fedx",)
    assert registry.method("fedprox").__module__.startswith("fedml_noniid."), "ours stays ours"
    foreign._known.clear()
    foreign._entry_points.cache_clear()
    own_package.advertise(
        place, "two-package", fedx="stranger2.fedx:FedX", other="stranger.fedx:FedX"
    )
    with pytest.raises(UserError, match="'fedx' is in several packages: one-package, two-package"):
        registry.parse("fedx")
    with pytest.raises(UserError, match="'other' of package two-package is called 'fedx' in its"):
        registry.parse("other")
    with pytest.raises(UserError, match=r"method 'fedxx' is unknown \(did you mean 'fedx'\?\)"):
        registry.parse("scaffold+fedxx")


def test_the_reserved_names_are_those_of_settings() -> None:
    """They stand beside methods in an entry of `recipes`, and in a run's parameters; or in a
    client's memory and in an Ask."""
    of_settings = {"fedavg", "data", "scenario", *config.Recipe.model_fields}
    assert {*of_settings, PERSONAL, MODELS} == foreign.RESERVED


def test_methods_lists_an_installed_one_and_one_that_fails(place: Path) -> None:
    name = "fedml_noniid.pipelines.verbs.recipes"
    shown = pytest.importorskip(name, reason="the command comes with [pipeline]")
    own_package.write(place, "stranger")
    own_package.advertise(place, "one-package", fedx="stranger.fedx:FedX", fedy="stranger.no:FedY")
    lines = shown.listing().splitlines()
    assert {"fedavg", "scaffold", "fedx", "fedy"} <= {*lines}
    assert "mu = 0.1" in lines[lines.index("fedx") + 1]
    assert "package one-package can't be imported" in lines[lines.index("fedy") + 1]
    assert "class FedX(Component)" in shown.description("stranger.fedx.FedX", with_source=True)
    assert "fedx+scaffold: composes" in shown.description("scaffold+fedx")


def test_only_an_unknown_name_looks_for_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scanning what is installed takes longer than all that a run without work does."""
    foreign._entry_points.cache_clear()
    scans = Mock(return_value=())
    monkeypatch.setattr(metadata, "entry_points", scans)
    registry.build("scaffold+fnr", {"fnr": {"p": 0.5}}, Setting(4, 2, n_public=9))
    assert not scans.called
    with pytest.raises(UserError, match="'fedx' is unknown"):
        registry.parse("fedx")
    scans.assert_called_once_with(group=foreign.GROUP)
    foreign._entry_points.cache_clear()


@pytest.mark.parametrize("has_source", [True, False])
def test_a_class_of_a_notebook_runs_in_processes(
    has_source: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its lines nobody knows its source: it runs, and the record says so."""
    cell = types.ModuleType("cell")
    cell.__file__ = "<cell>"
    monkeypatch.setitem(sys.modules, "cell", cell)
    if has_source:
        lines = own_package.METHOD.splitlines(keepends=True)
        monkeypatch.setitem(linecache.cache, "<cell>", (1, None, lines, "<cell>"))
    exec(compile(own_package.METHOD, "<cell>", "exec"), vars(cell))
    nd.register(cell.FedX)
    how: dict[str, Any] = {"partition": "iid", "clients": 2, "rounds": 1, "progress": False}
    result = nd.run("fedx", nd.load("digits"), seeds=[0, 1], processes=2, **how)
    (source,) = registry.own_code("fedx").values()
    assert len(result.rounds) == 2 and (source != "unknown") is has_source
