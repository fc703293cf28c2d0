"""What a result depends on: the code of its own methods and of the simulation, found by what files import."""

from __future__ import annotations

import sys

import pytest

from fedml_noniid.pipelines.experiment import config, provenance
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
