"""Every option and every key of every settings file refuses wrong values, in one walk."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import BaseModel

from fedml_noniid.core.errors import MISSING, UNKNOWN, UserError, located, shown, together
from fedml_noniid.core.options import (
    Count,
    Momentum,
    OneOf,
    Positive,
    Range,
    RecipeError,
    Section,
    check_options,
    model_of,
    validated,
)
from fedml_noniid.data.datasets import DATASETS, Preprocessing
from fedml_noniid.data.partitions import PARTITIONS
from fedml_noniid.deploy import settings as silo
from fedml_noniid.engines.callbacks import CALLBACKS
from fedml_noniid.engines.local_training import LocalTraining
from fedml_noniid.models import MODELS
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.plugins.registry import METHODS
from fedml_noniid.rates import DECAYS

HUGE = 10**400  # too large for a float
LARGE = 1e39  # too large for a float32


def wrong(hint: Any, none: bool = False) -> list[object]:
    """Values that no option with this type takes: of another kind, and beyond each end.

    `none`: whether null is allowed.
    """
    kind, *about = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    beyond = [
        end
        for of in about
        if isinstance(of, Range)
        for end in (of.low - max(1, abs(of.low)), of.high + max(1, abs(of.high)))
        if math.isfinite(end)
    ]
    nothing: list[object] = [] if none else [None]
    if get_origin(kind) in (Union, UnionType):
        one, *others = [part for part in get_args(kind) if part is not type(None)]
        if others and one is int:
            return [2.5, {}]  # a number, or a list of texts
        return [3, {}] if others else wrong(one, none=True)  # a text, or a list of texts
    if get_origin(kind) is Literal:
        words = [word for word in get_args(kind) if isinstance(word, str)]
        # YAML's flags beside words, such as `on`, are True for Python: 1 is not.
        flags = [1, 0] if words and len(words) < len(get_args(kind)) else []
        return [f"{get_args(kind)[-1]}x", 3, *flags, *nothing]
    if any(isinstance(of, OneOf) for of in about):
        return ["no such word", 3, False, *nothing]
    if get_origin(kind) in (list, tuple):
        return [3, "text", {}, *nothing, *([one] for one in wrong(get_args(kind)[0]))]
    if get_origin(kind) is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return [3, "text", ["text"]]
    number: list[object] = [True, "1", [1], *nothing]
    return {
        float: [*number, math.nan, math.inf, HUGE, *map(float, beyond)],
        int: [*number, 2.0, 2.5, HUGE, *map(int, beyond)],
        bool: [1, "yes", *nothing],
        str: [1, ["x"], *nothing],
    }.get(kind, [])


KINDS: Mapping[str, Callable[..., object]] = {
    **METHODS,
    **DATASETS,
    **PARTITIONS,
    **MODELS,
    **DECAYS,
    **CALLBACKS,
    "preprocessing": Preprocessing,
}


@pytest.mark.parametrize("name", KINDS)
def test_wrong_options_are_named(name: str) -> None:
    """Before anything is read, drawn or composed, so that a file is refused as a whole."""
    fields = model_of(KINDS[name]).model_fields
    for key, field in fields.items():
        hint = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        large = [LARGE] if float in (hint, *get_args(hint)) else []
        for value in (*wrong(hint), *large):
            with pytest.raises(UserError) as error:
                check_options(KINDS[name], {key: value})
            first = next(one for one in error.value.mistakes if one.path[0] == key)
            assert str(first).startswith(key) and len(str(first)) < 400
            assert first.what == MISSING or first.allowed
        with pytest.raises(UserError) as error:
            check_options(KINDS[name], {f"{key}x": 1})
        (unknown,) = [one for one in error.value.mistakes if one.what == UNKNOWN]
        assert (unknown.path, unknown.meant) == ((f"{key}x",), key)


def sections(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """A section and all below it."""
    yield kind
    for field in kind.model_fields.values():
        for part in (field.annotation, *get_args(field.annotation)):
            if isinstance(part, type) and issubclass(part, BaseModel):
                yield from sections(part)
            yield from (
                one
                for deep in get_args(part)
                if isinstance(deep, type) and issubclass(deep, BaseModel)
                for one in sections(deep)
            )


@pytest.mark.parametrize("kind", [*sections(config.Config), *sections(silo.Deployment)])
def test_wrong_values_of_a_section_are_named(kind: type[BaseModel]) -> None:
    for name, field in kind.model_fields.items():
        key = field.alias or name
        hint = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
        for value in wrong(hint):
            with pytest.raises(UserError) as error:
                validated(kind, {key: value})
            first = next(one for one in error.value.mistakes if one.path[:1] == (key,))
            assert str(first).startswith(key) and len(str(first)) < 600


@dataclass(frozen=True)
class Options:
    """Of a user's class."""

    mu: Positive
    gamma: Momentum = 0.9
    at: tuple[Count, ...] = ()
    size: int | None = None
    folder: Path = Path()


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"mu": 0}, "mu = 0 is refused; allowed: a number above 0"),
        ({"mu": 1, "gamma": 1.0}, "gamma = 1.0 is refused; allowed: a number from 0, below 1"),
        (
            {"mu": 1, "at": [2, 0]},
            "at[1] = 0 is refused; allowed: a whole number from 1 to 1000000000",
        ),
        ({"mu": 1, "size": 2**63}, "size = 9223372036854775808 is refused"),
        ({"mu": 1, "gama": 1}, "gama is unknown (did you mean 'gamma'?); allowed: mu, gamma, at"),
        ({}, "mu is missing"),
        ({"mu": "9" * 999}, f"mu = {shown('9' * 999)} is refused"),
    ],
)
def test_a_mistake_is_one_line(values: dict[str, object], line: str) -> None:
    with pytest.raises(UserError) as error:
        check_options(Options, values)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)
    check_options(Options, {"mu": 1, "at": [1, 2], "size": None, "folder": "anything"})


def test_a_section_made_in_python_is_refused_in_the_same_words() -> None:
    """`LocalTraining(optimizer="adm")` of a notebook is an error for people too."""
    with pytest.raises(UserError) as error:
        LocalTraining(optimizer="adm", lr=0.1, epochs=True, batch_size=2)
    first, second = error.value.mistakes
    assert (first.path, first.value, first.meant) == (("optimizer",), "adm", "adam")
    assert (second.path, second.value) == (("epochs",), True)


class Inner(Section):
    """Below `Outer`."""

    n: Count


class Outer(Section):
    """Of a file."""

    parts: dict[str, Inner]


def test_the_place_of_a_mistake_is_its_path() -> None:
    with pytest.raises(UserError) as error, located(source="params.yaml"):
        validated(Outer, {"parts": {"a": {"n": 0}, "b": {"m": 1}}})
    assert str(error.value).splitlines() == [
        "params.yaml: parts.a.n = 0 is refused; allowed: a whole number from 1 to 1000000000",
        "params.yaml: parts.b.n is missing",
        "params.yaml: parts.b.m is unknown; allowed: n",
    ]


def test_errors_are_collected_once_each_and_keep_their_kind() -> None:
    def compose_all() -> None:
        with together(kind=RecipeError) as each:
            for name in ("a", "b", "a"):
                with each("recipes", name):
                    raise UserError("can't be composed", allowed="other pairs", meant="c")

    with pytest.raises(RecipeError) as error:
        compose_all()
    lines = [
        f"recipes.{name}: can't be composed (did you mean 'c'?); allowed: other pairs"
        for name in "ab"
    ]
    assert str(error.value).splitlines() == lines
    again = pickle.loads(pickle.dumps(error.value))  # from a worker process
    assert type(again) is RecipeError and again.mistakes == error.value.mistakes


@pytest.mark.parametrize(
    ("of", "inside", "outside", "words"),
    [
        (Range(0), [0, 5], [-1], "from 0 up"),
        (Range(0, open="("), [0.1], [0, -1], "above 0"),
        (Range(0, 1), [0, 1], [-0.1, 1.1], "from 0 to 1"),
        (Range(0, 1, open=")"), [0, 0.9], [1], "from 0, below 1"),
        (Range(0, 1, open="("), [0.1, 1], [0], "above 0, at most 1"),
        (Range(0, 1, open="()"), [0.5], [0, 1], "between 0 and 1"),
        (Range(0, open="()"), [0.1], [0], "above 0"),
        (Range(-1, whole=True), [-1, 0.0, 7, 2.0**60], [-2, -0.5, 1.5], "from -1 up"),
    ],
)
def test_ranges_have_open_and_closed_ends(
    of: Range, inside: list[float], outside: list[float], words: str
) -> None:
    assert all(value in of for value in inside) and not any(value in of for value in outside)
    assert str(of) == words
