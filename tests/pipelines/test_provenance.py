"""What a result depends on: the code of its own methods and of the simulation, found by what files
import."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fedml_noniid.pipelines.experiment import config, facts, provenance, usercache
from fedml_noniid.plugins import recipes
from fedml_noniid.plugins.core.errors import UserError
from tests.pipelines.small import PARAMS, ROOT, environment, run_stages

SHARED = {
    "core/algorithm.py",
    "core/randomness.py",
    "engines/simulation.py",
    "engines/vectorized.py",
    "models/layers.py",
    "models/recurrent.py",
    "data/batches.py",
    "data/noise.py",
    "data/streams.py",
    "recipes.py",
}


def files(recipe: str) -> set[str]:
    """The files of `plugins` that a training of the recipe depends on."""
    modules = [module for module, _ in facts.methods([recipe])[recipe].values()]
    found = provenance.files("fedml_noniid.pipelines.experiment.training", *modules)
    return {
        path.relative_to(provenance.ROOT).as_posix().removeprefix("fedml_noniid/plugins/")
        for path in found
    }


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
        name
        for name in found
        if name.split("/")[0] in ("baselines", "fnr", "ccn", "fednlr", "fednnnn", "rfedavg")
    }
    assert methods == own
    assert not [
        name for name in found if name.startswith(("silo/", "data/readers", "data/partitions"))
    ]


def test_nothing_that_a_training_imports_is_left_out() -> None:
    """Every module of ours that is loaded with the methods is a dependency of some recipe, or no
    part of training."""
    every = set().union(*(files(name) for name in ("fedavg", *recipes.METHODS)))
    loaded = {
        module.__file__
        for name, module in sys.modules.items()
        if name.startswith("plugins.") and module.__file__
    }
    rest = {
        name for name in (str(file).split("/plugins/")[1] for file in loaded) if name not in every
    }
    outside = (
        "silo/",
        "data/readers/",
        "data/partitions/",
        "data/datasets.py",
        "data/splits.py",
        "data/statistics.py",
        "data/alike.py",
        "settings.py",
    )
    assert {
        name for name in rest if not name.startswith(outside) and not name.endswith("pair.py")
    } == set()


def test_a_cpu_of_another_maker_is_another_kind_of_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two makers' CPUs with the same instructions were measured to give other bits."""
    settings = config.load(ROOT)
    found = []
    for vendor in ("GenuineIntel", "AuthenticAMD"):
        monkeypatch.setattr(provenance, "_of_cpu", {"vendor_id": vendor}.__getitem__)
        found.append(
            (
                provenance.machine_kind(settings),
                provenance.of_training(settings, settings.units()[0]),
            )
        )
    (first, one), (second, other) = found
    assert first | {"vendor": "AuthenticAMD"} == second and one != other


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that was written long ago, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "module.py"
    path.write_text("x = 1\n")
    os.utime(path, (0, 0))
    monkeypatch.setattr(usercache, "SETTLED_NS", 0)
    yield path
    for cached in (provenance._source, provenance._known):
        cached.cache_clear()


def found(path: Path) -> provenance._Source:
    """As a new process finds it, and stores it."""
    for cached in (provenance._source, provenance._known):
        cached.cache_clear()
    source = provenance._source(path)
    provenance._save()
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
def test_an_edit_that_sets_the_clock_back_is_noticed(
    file: Path, edit: Callable[[Path], None]
) -> None:
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


def test_a_file_of_the_last_two_seconds_is_not_stored(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usercache, "SETTLED_NS", 10**12)
    found(file)
    assert not usercache.folder().exists()


def test_a_cache_that_cannot_be_written_is_no_error(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # is no folder
    assert found(file) == provenance._of_file(file)


def test_plan_and_report_import_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the settings were checked, by whatever process: also no mlflow and no scipy.stats."""
    monkeypatch.setattr(usercache, "SETTLED_NS", 0)
    (tmp_path / "params.yaml").write_text(PARAMS.replace("device: cpu", "device: auto"))
    (tmp_path / ".dvc" / "tmp").mkdir(parents=True)
    run_stages(tmp_path, ("plan", "prepare", "partition", "train", "evaluate"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "plan").iterdir()}
    for stage in ("plan", "report"):
        code = (
            "import sys; from fedml_noniid.pipelines.stages.__main__ import main\n"
            f"code = main([{stage!r}]); slow = ['torch', 'scipy.stats', 'mlflow', 'sklearn']\n"
            "sys.exit(str([name for name in slow if name in sys.modules]) if code == 0 else code)"
        )
        named = environment() | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=named, capture_output=True, text=True
        )
        assert done.stderr == "[]\n", stage
    assert {path.name: path.read_bytes() for path in (tmp_path / "plan").iterdir()} == before


def test_facts_are_those_of_torch_until_something_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usercache, "SETTLED_NS", 0)
    (tmp_path / ".dvc" / "tmp").mkdir(parents=True)
    (tmp_path / "params.yaml").write_text(PARAMS)
    asked = config.load(tmp_path)
    known = config.load(tmp_path)
    assert asked.facts == {} and known.facts["torch"] == torch.__version__
    assert known.model_dump() == asked.model_dump()
    assert known.methods_of("scaffold+fnr") == asked.methods_of("scaffold+fnr")
    assert provenance.plan(known) == provenance.plan(asked)
    kind = provenance.machine_kind(asked)
    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torch")
        assert provenance.machine_kind(known) == kind and "torch" not in sys.modules

    (tmp_path / "params.yaml").write_text(PARAMS.replace("p: 0.5", "p: 5"))
    with pytest.raises(UserError, match=r"fnr\.p = 5 is refused"):
        config.load(tmp_path)
    (tmp_path / "params.yaml").write_text(PARAMS)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert config.load(tmp_path).facts == {}
