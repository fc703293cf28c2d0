"""Names and hyper-parameters to algorithms, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from plugins import recipes
from plugins.core.component import Component, RecipeError, Setting

SETTING = Setting(n_clients=20, cohort=5, n_classes=10, feature_size=64, optimizer="sgd", lr=0.1, n_public=100)


def refused(recipe: str, settings: Any, *words: str) -> None:
    """With one line that contains all words."""
    for check in (recipes.check_settings, lambda r, s: recipes.build(r, s, SETTING)):
        with pytest.raises(RecipeError) as error:
            check(recipe, settings)
        message = str(error.value)
        assert "\n" not in message
        for word in words:
            assert word in message


def test_fedavg_is_the_empty_recipe() -> None:
    assert recipes.parse("fedavg") == ()
    assert recipes.build("fedavg", {}, SETTING).components == ()
    assert recipes.parse("fedavg+fnr") == ("fnr",)


def test_blanks_around_names_do_not_matter() -> None:
    assert recipes.parse(" scaffold + fnr ") == ("scaffold", "fnr")


def test_hyper_parameters_and_the_setting_are_filled_in() -> None:
    algorithm = recipes.build("scaffold+fnr", {"fnr": {"p": 0.2, "epochs": 1}}, SETTING)
    parts: dict[str, Any] = {c.name: c for c in algorithm.components}
    assert (parts["fnr"].p, parts["fnr"].epochs, parts["fnr"].n_classes) == (0.2, 1, 10)
    assert parts["scaffold"].n_clients == 20


def test_an_integer_will_do_for_a_number() -> None:
    (component,) = recipes.build("fedprox", {"fedprox": {"mu": 1}}, SETTING).components
    assert dataclasses.asdict(component) == {"mu": 1}


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("fednnn", ["'fednnn' is unknown", "did you mean 'fednnnn'?", "allowed: fedavg, ccn"]),
        ("scafold+fnr", ["'scafold+fnr'", "'scafold' is unknown", "did you mean 'scaffold'?"]),
        ("fnr+FedProx", ["'FedProx'", "did you mean 'fedprox'?"]),
        ("rfedavg+", ["'' is unknown"]),
        ("", ["'' is unknown"]),
        ("fnr+fnr", ["names a method twice"]),
        ("fedavg+fedavg", ["names a method twice"]),
    ],
)
def test_unknown_or_repeated_methods(recipe: str, words: list[str]) -> None:
    refused(recipe, {}, *words)


@pytest.mark.parametrize(
    ("recipe", "settings", "words"),
    [
        (
            "fnr",
            {"fnr": {"lamda": 1.0}},
            ["fnr has no hyper-parameter 'lamda'", "did you mean 'lam'?", "allowed: p, lam"],
        ),
        ("fedprox", {"fedprox": {"zzz": 1.0}}, ["fedprox", "'zzz'", "allowed: mu"]),
        ("scaffold", {"scaffold": {"n_clients": 3}}, ["scaffold", "'n_clients'", "allowed: server_lr"]),
        ("fednnnn", {"fednnnn": {"Beta": 1.0}}, ["'Beta'", "did you mean 'beta'?"]),
        ("fnr", {"fn": {"p": 0.5}}, ["settings for 'fn'", "did you mean 'fnr'?"]),
        ("fnr", {"scaffold": {"server_lr": 1.0}}, ["'scaffold'", "not part of it", "allowed: fnr"]),
        ("fedavg", {"fedavg": {"mu": 1.0}}, ["'fedavg'", "has no hyper-parameters"]),
    ],
)
def test_unknown_keys(recipe: str, settings: Any, words: list[str]) -> None:
    refused(recipe, settings, *words)


@pytest.mark.parametrize(
    ("recipe", "key", "value", "kind"),
    [
        ("fedprox", "mu", float("nan"), "a finite number"),
        ("fedprox", "mu", float("inf"), "a finite number"),
        ("fedprox", "mu", True, "a finite number"),
        ("fedprox", "mu", "0.1", "a finite number"),
        ("fedprox", "mu", None, "a finite number"),
        ("fedprox", "mu", [0.1], "a finite number"),
        ("fnr", "epochs", 2.5, "a whole number"),
        ("fnr", "epochs", 2.0, "a whole number"),
        ("fnr", "epochs", True, "a whole number"),
        ("fnr", "epochs", "2", "a whole number"),
        ("ccn", "T", float("-inf"), "a finite number"),
    ],
)
def test_values_of_the_wrong_kind(recipe: str, key: str, value: object, kind: str) -> None:
    refused(recipe, {recipe: {key: value}}, f"{recipe}.{key} = {value!r}", f"must be {kind}")


NUMBERS = [
    (method, key)
    for method in recipes.METHODS
    for key, default in recipes.hyper_parameters(method).items()
    if isinstance(default, float)
]


@pytest.mark.parametrize(("method", "key"), NUMBERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "1"])
def test_no_number_of_any_method_takes_nan_infinity_a_flag_or_text(method: str, key: str, value: object) -> None:
    refused(method, {method: {key: value}}, f"{method}.{key}")


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("fedprox", {"mu": -0.1}),
        ("scaffold", {"server_lr": -1.0}),
        ("fnr", {"p": 1.1}),
        ("fednnnn", {"beta": 0.0}),
        ("ccn", {"T": 0.0}),
        ("fednlr", {"a1": -1.0}),
        ("rfedavg", {"lam": -1e-4}),
        ("rfedavg_plus", {"lam": -1e-4}),
        ("ccvr", {"samples": 0}),
        ("datasharing", {"share": 1.5}),
        ("feddc", {"alpha": -1.0}),
        ("feddf", {"T": 0.0}),
        ("feddyn", {"alpha": 0.0}),
        ("fedftg", {"batch_size": 1}),
        ("fedgen", {"decay": 0.0}),
        ("fedlc", {"tau": -0.5}),
        ("fednova", {"mu": -1.0}),
        ("fedrs", {"alpha": 1.5}),
        ("moon", {"tau": 0.0}),
        ("qfedavg", {"q": -1.0}),
        ("sgdm", {"gamma": 1.0}),
    ],
)
def test_values_out_of_range_name_method_and_key(recipe: str, settings: dict[str, float]) -> None:
    ((key, value),) = settings.items()
    with pytest.raises(RecipeError, match=rf"{recipe}: .*{key} = {value}"):
        recipes.build(recipe, {recipe: settings}, SETTING)


WORDS = [
    (method, key)
    for method in recipes.METHODS
    for key, default in recipes.hyper_parameters(method).items()
    if isinstance(default, str)
]


@pytest.mark.parametrize(("method", "key"), WORDS)
def test_no_option_of_any_method_takes_a_word_it_does_not_know(method: str, key: str) -> None:
    with pytest.raises(RecipeError, match=rf"{method}(\.|: .*){key} = 'nonsense'"):
        recipes.build(method, {method: {key: "nonsense"}}, SETTING)


OPTIONS = [(method, key) for method in recipes.METHODS for key in recipes.METHODS[method].options]


@pytest.mark.parametrize(("method", "key"), OPTIONS)
def test_options_take_their_words_and_name_the_nearest(method: str, key: str) -> None:
    """Before anything is composed, so that params.yaml is refused as a whole."""
    first, *others = recipes.METHODS[method].options[key]
    assert recipes.hyper_parameters(method)[key] == first, "the default comes first"
    for word in (first, *others):
        recipes.check_settings(method, {method: {key: word}})
    allowed = ", ".join((first, *others))
    refused(
        method, {method: {key: others[0] + "x"}}, f"{method}.{key} = '{others[0]}x' is unknown", f"allowed: {allowed}"
    )


@pytest.mark.parametrize("method", recipes.METHODS)
def test_every_method_builds_with_its_defaults(method: str) -> None:
    (component,) = recipes.build(method, {}, SETTING).components
    assert isinstance(component, Component)
    assert component.name == method
    for key, value in recipes.hyper_parameters(method).items():
        assert getattr(component, key) == value, "a hyper-parameter has a default, what the setting fills in has none"
