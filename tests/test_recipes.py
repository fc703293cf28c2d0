"""Names and hyper-parameters to algorithms, and what is refused."""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fedml_noniid.core.component import Setting
from fedml_noniid.core.errors import Mistake
from fedml_noniid.core.options import RecipeError
from fedml_noniid.plugins import registry

SETTING = Setting(n_clients=20, cohort=5, optimizer="sgd", lr=0.1, n_public=100)


def mistakes(recipe: str, settings: Any) -> list[Mistake]:
    """What a recipe's settings are refused with, also before it is composed."""
    found = []
    for check in (registry.check_settings, lambda r, s: registry.build(r, s, SETTING)):
        with pytest.raises(RecipeError) as error:
            check(recipe, settings)
        found.append(error.value.mistakes)
    assert found[0] == found[1]
    return [*found[0]]


def test_fedavg_is_the_empty_recipe() -> None:
    assert registry.parse("fedavg") == ()
    assert registry.build("fedavg", {}, SETTING).components == ()
    assert registry.parse("fedavg+fnr") == ("fnr",)
    assert registry.parse(" scaffold + fnr ") == ("scaffold", "fnr"), "blanks do not matter"


def test_hyper_parameters_are_filled_in() -> None:
    algorithm = registry.build("scaffold+fnr", {"fnr": {"p": 0.2, "epochs": 1}}, SETTING)
    parts: dict[str, Any] = {c.name: c for c in algorithm.components}
    assert (parts["fnr"].p, parts["fnr"].epochs, parts["fnr"].batch_size) == (0.2, 1, 32)
    assert algorithm.setting == SETTING


def test_a_method_on_public_data_needs_some() -> None:
    for recipe in ("fnr", "feddf"):
        with pytest.raises(RecipeError, match=f"{recipe}: needs a public split, but public is 0"):
            registry.build(recipe, {}, SETTING._replace(n_public=0))
    registry.build("tests.leaking:Peek", {}, SETTING._replace(n_public=0))


def test_an_integer_will_do_for_a_number() -> None:
    (component,) = registry.build("fedprox", {"fedprox": {"mu": 1}}, SETTING).components
    assert dataclasses.asdict(component) == {"mu": 1}


@pytest.mark.parametrize(
    ("recipe", "meant"),
    [("fednnn", "fednnnn"), ("scafold+fnr", "scaffold"), ("fnr+FedProx", "fedprox"), ("", "")],
)
def test_an_unknown_method_names_the_nearest(recipe: str, meant: str) -> None:
    (mistake,) = mistakes(recipe, {})
    assert mistake.meant == meant and mistake.allowed.startswith("fedavg, apfl")
    assert f"recipe {recipe!r}: method " in mistake.what


@pytest.mark.parametrize("recipe", ["fnr+fnr", "fedavg+fedavg"])
def test_a_recipe_names_each_method_once(recipe: str) -> None:
    assert "names a method twice" in mistakes(recipe, {})[0].what


@pytest.mark.parametrize(
    ("recipe", "method", "meant", "allowed"),
    [
        ("fnr", "fn", "fnr", "fnr"),
        ("fnr", "scaffold", "", "fnr"),
        ("fedavg", "fedavg", "", "none, fedavg has no hyper-parameters"),
    ],
)
def test_settings_belong_to_methods_of_the_recipe(
    recipe: str, method: str, meant: str, allowed: str
) -> None:
    (mistake,) = mistakes(recipe, {method: {"mu": 1.0}})
    assert (mistake.path, mistake.meant, mistake.allowed) == ((method,), meant, allowed)


# Values just beyond the ranges, by method: the walk above takes the ranges from the code.
BEYOND: dict[str, dict[str, list[float]]] = {
    "ccn": {"T": [0.0]},
    "ccvr": {"samples": [0], "epochs": [-1], "server_lr": [0.0], "momentum": [1.0]},
    "datasharing": {"share": [-0.1, 1.1]},
    "feddc": {"alpha": [-1.0]},
    "feddf": {"steps": [-1], "batch_size": [0], "server_lr": [0.0], "T": [0.0], "clip": [0.0]},
    "feddyn": {"alpha": [0.0, -1.0]},
    "fsl": {"epochs": [-1], "batch_size": [0]},
    "feddyn_authors": {"clip": [-1.0]},
    "fedftg": {
        "iterations": [-1],
        "generator_steps": [-1],
        "model_steps": [-1],
        "lambda_cls": [-1.0],
        "lambda_dis": [-1.0],
        "batch_size": [1],
        "noise_dim": [0],
        "hidden": [0],
        "generator_lr": [0.0],
        "server_lr": [0.0],
    },
    "fedgen": {
        "generative_alpha": [-1.0],
        "generative_beta": [-1.0],
        "weight_decay": [-1.0],
        "alpha": [-1.0],
        "eta": [-1.0],
        "beta": [-1.0],
        "steps": [-1],
        "gen_batch_size": [0],
        "hidden": [0],
        "noise_dim": [0],
        "batch_size": [0],
        "decay": [0.0, 1.5],
        "generator_lr": [0.0],
    },
    "fedlc": {"tau": [-0.5]},
    "fednlr": {"a1": [-1.0]},
    "fednnnn": {"beta": [0.0, -1.0], "gamma": [1.0, -0.1]},
    "fednova": {"mu": [-1.0]},
    "fedprox": {"mu": [-0.1]},
    "fedrs": {"alpha": [-0.5, 1.5]},
    "fnr": {"p": [-0.1, 1.1], "epochs": [-1], "batch_size": [0]},
    "moon": {"mu": [-0.1], "tau": [0.0, -1.0]},
    "qfedavg": {"q": [-1.0]},
    "rfedavg": {"lam": [-1e-4], "clip": [-1.0], "L": [0]},
    "scaffold": {"server_lr": [-1.0]},
    "sgdm": {"gamma": [1.0, -0.1]},
}


@pytest.mark.parametrize("method", BEYOND)
def test_values_beyond_the_papers_ranges_are_refused(method: str) -> None:
    for key, values in BEYOND[method].items():
        for value in values:
            (mistake,) = mistakes(method, {method: {key: value}})
            assert (mistake.path, mistake.value) == ((method, key), value)


def test_every_mistake_is_named_at_once() -> None:
    found = mistakes("scaffold+fnr", {"fnr": {"p": 2, "epoch": 1}, "moon": {}, "scaffold": 3})
    assert [mistake.path for mistake in found] == [
        ("fnr", "p"),
        ("fnr", "epoch"),
        ("moon",),
        ("scaffold",),
    ]


@pytest.mark.parametrize("method", registry.METHODS)
def test_options_take_their_words(method: str) -> None:
    for key, words in registry.choices(method).items():
        assert registry.hyper_parameters(method)[key] in words
        for word in words:
            registry.check_settings(method, {method: {key: word}})


@pytest.mark.parametrize("method", sorted(registry.METHODS))
def test_the_page_of_methods_has_a_line_with_its_source(method: str) -> None:
    page = (Path(__file__).parents[1] / "docs" / "methods.md").read_text()
    (line,) = [
        line for line in page.splitlines() if line.startswith("|") and f"| `{method}` |" in line
    ]
    source = sys.modules[registry.METHODS[method].__module__].__doc__ or ""
    named = re.search(r"\]\((https?://[^)]+)\)", line)
    assert registry.METHODS[method]().needs.pooled if named is None else named[1] in source
