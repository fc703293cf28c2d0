"""Names and hyper-parameters to algorithms, and what is refused."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from fedml_noniid.plugins import recipes
from fedml_noniid.plugins.core.component import Component, Setting
from fedml_noniid.plugins.core.options import Range, RecipeError

SETTING = Setting(n_clients=20, cohort=5, optimizer="sgd", lr=0.1, n_public=100)


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


def test_hyper_parameters_are_filled_in() -> None:
    algorithm = recipes.build("scaffold+fnr", {"fnr": {"p": 0.2, "epochs": 1}}, SETTING)
    parts: dict[str, Any] = {c.name: c for c in algorithm.components}
    assert (parts["fnr"].p, parts["fnr"].epochs, parts["fnr"].batch_size) == (0.2, 1, 32)
    assert algorithm.setting == SETTING


def test_a_method_on_public_data_needs_some() -> None:
    for recipe in ("fnr", "feddf"):
        with pytest.raises(
            RecipeError, match=f"{recipe}: needs a public split, but data.public is 0"
        ):
            recipes.build(recipe, {}, SETTING._replace(n_public=0))
    recipes.build(
        "fnr_authors", {"fnr_authors": {"public_data": "test"}}, SETTING._replace(n_public=0)
    )


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
        (
            "scaffold",
            {"scaffold": {"n_clients": 3}},
            ["scaffold", "'n_clients'", "allowed: server_lr"],
        ),
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
    refused(recipe, {recipe: {key: value}}, f"{recipe}: {key} = {value!r}", f"must be {kind}")


NUMBERS = [
    (method, key)
    for method in recipes.METHODS
    for key, default in recipes.hyper_parameters(method).items()
    if isinstance(default, float)
]


@pytest.mark.parametrize(("method", "key"), NUMBERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "1"])
def test_no_number_of_any_method_takes_nan_infinity_a_flag_or_text(
    method: str, key: str, value: object
) -> None:
    refused(method, {method: {key: value}}, f"{method}: {key}")


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
    refused(recipe, {recipe: settings}, f"{recipe}: {key} = {value} must ")


RANGED = [
    (method, key, value)
    for method, kind in recipes.METHODS.items()
    for key, hint in get_type_hints(kind, include_extras=True).items()
    for of in get_args(hint)
    if isinstance(of, Range)
    for value in [of.low - 1] * (of.low > -math.inf) + [of.high + 1] * (of.high < math.inf)
]


@pytest.mark.parametrize(("method", "key", "value"), RANGED)
def test_values_beyond_an_end_of_a_range_are_refused(method: str, key: str, value: float) -> None:
    value = value if isinstance(recipes.hyper_parameters(method)[key], float) else int(value)
    refused(method, {method: {key: value}}, f"{method}: {key} = {value} must ")


@pytest.mark.parametrize(
    ("of", "inside", "outside", "words"),
    [
        (Range(0), [0, 5], [-1], "be at least 0"),
        (Range(0, open="("), [0.1], [0, -1], "be above 0"),
        (Range(0, 1), [0, 1], [-0.1, 1.1], "lie in [0, 1]"),
        (Range(0, 1, open=")"), [0, 0.9], [1], "lie in [0, 1)"),
        (Range(0, 1, open="("), [0.1, 1], [0], "lie in (0, 1]"),
    ],
)
def test_ranges_have_open_and_closed_ends(
    of: Range, inside: list[float], outside: list[float], words: str
) -> None:
    assert all(value in of for value in inside) and not any(value in of for value in outside)
    assert str(of) == words


WORDS = [
    (method, key, words)
    for method in recipes.METHODS
    for key, words in recipes.words(method).items()
]


@pytest.mark.parametrize(("method", "key", "words"), WORDS)
def test_options_take_their_words_and_name_the_nearest(
    method: str, key: str, words: tuple[str, ...]
) -> None:
    """Before anything is composed, so that params.yaml is refused as a whole."""
    assert recipes.hyper_parameters(method)[key] in words
    for word in words:
        recipes.check_settings(method, {method: {key: word}})
    typo = words[-1] + "x"
    refused(
        method,
        {method: {key: typo}},
        f"{method}: {key} = '{typo}' is unknown",
        f"allowed: {', '.join(words)}",
    )
    refused(method, {method: {key: 1}}, f"{method}: {key} = 1", "must be text")


@pytest.mark.parametrize("method", recipes.METHODS)
def test_every_method_builds_with_its_defaults(method: str) -> None:
    (component,) = recipes.build(method, {}, SETTING).components
    assert isinstance(component, Component)
    assert component.name == method
    for key, value in recipes.hyper_parameters(method).items():
        assert value is not None and getattr(component, key) == value, (
            "every hyper-parameter has a default"
        )


@pytest.mark.parametrize("method", sorted(recipes.METHODS))
def test_the_page_of_methods_has_a_line_with_its_source(method: str) -> None:
    page = (Path(__file__).parents[1] / "docs" / "methods.md").read_text()
    (line,) = [
        line for line in page.splitlines() if line.startswith("|") and f"| `{method}` |" in line
    ]
    source = sys.modules[recipes.METHODS[method].__module__].__doc__ or ""
    named = re.search(r"\]\((https?://[^)]+)\)", line)
    assert recipes.METHODS[method]().needs.pooled if named is None else named[1] in source


def test_a_hyper_parameter_of_a_variant_names_the_variant() -> None:
    with pytest.raises(
        RecipeError,
        match=r"fnr has no hyper-parameter 'fnr_reg'; allowed: p, .*; fnr_authors has it",
    ):
        recipes.check_settings("fnr", {"fnr": {"fnr_reg": "off"}})
