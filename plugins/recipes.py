"""The one registry: names to components, recipes such as "scaffold+fnr" to algorithms."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import get_type_hints

from plugins.baselines.ccvr import CCVR
from plugins.baselines.centralised import Centralised
from plugins.baselines.datasharing import DataSharing
from plugins.baselines.fedbabu import FedBABU
from plugins.baselines.feddc import FedDC
from plugins.baselines.feddf import FedDF
from plugins.baselines.feddyn import FedDyn
from plugins.baselines.fedftg import FedFTG
from plugins.baselines.fedgen import FedGen
from plugins.baselines.fedlc import FedLC
from plugins.baselines.fednova import FedNova
from plugins.baselines.fedprox import FedProx
from plugins.baselines.fedrs import FedRS
from plugins.baselines.moon import MOON
from plugins.baselines.qfedavg import QFedAvg
from plugins.baselines.scaffold import Scaffold
from plugins.baselines.sgdm import SGDM
from plugins.ccn.algorithm import CCN
from plugins.core.algorithm import Algorithm
from plugins.core.component import Component, RecipeError, Setting
from plugins.core.errors import nearest
from plugins.fednlr.algorithm import FedNLR
from plugins.fednnnn.algorithm import FedNNNN
from plugins.fnr.algorithm import FNR
from plugins.rfedavg.algorithm import RFedAvg, RFedAvgPlus

METHODS: dict[str, type[Component]] = {
    kind.name: kind
    for kind in (
        CCN,
        CCVR,
        Centralised,
        DataSharing,
        FedBABU,
        FedDC,
        FedDF,
        FedDyn,
        FedFTG,
        FedGen,
        FedLC,
        FedNLR,
        FedNNNN,
        FedNova,
        FedProx,
        FedRS,
        FNR,
        MOON,
        QFedAvg,
        RFedAvg,
        RFedAvgPlus,
        Scaffold,
        SGDM,
    )
}

Settings = Mapping[str, Mapping[str, object]]  # method -> hyper-parameter -> value


def parse(recipe: str) -> tuple[str, ...]:
    """The method names of a recipe; `"fedavg"` is the empty one. RecipeError names an unknown method."""
    names = [name.strip() for name in recipe.split("+")]
    for name in names:
        if name not in METHODS and name != "fedavg":
            raise RecipeError(
                f"recipe {recipe!r}: method {name!r} is unknown{nearest(name, METHODS)}; "
                f"allowed: fedavg, {', '.join(sorted(METHODS))}"
            )
    if len(set(names)) < len(names):
        raise RecipeError(f"recipe {recipe!r} names a method twice; a recipe is a set, name each method once")
    return tuple(name for name in names if name != "fedavg")


def hyper_parameters(method: str) -> dict[str, object]:
    """The hyper-parameters of a method that a user may set, with their defaults."""
    return {
        field.name: field.default for field in dataclasses.fields(METHODS[method]) if field.name not in Setting._fields
    }


def check_settings(recipe: str, settings: Settings) -> None:
    """RecipeError for a hyper-parameter that no method of the recipe has, or a value of the wrong kind."""
    methods = parse(recipe)
    for method, values in settings.items():
        if method not in methods:
            allowed = ", ".join(methods) or "none, fedavg has no hyper-parameters"
            raise RecipeError(
                f"recipe {recipe!r}: settings for {method!r}{nearest(method, methods)}, which is not part of it; "
                f"allowed: {allowed}"
            )
        known, hints = hyper_parameters(method), get_type_hints(METHODS[method])
        for key, value in values.items():
            if key not in known:
                allowed = ", ".join(known) or "none"
                raise RecipeError(
                    f"recipe {recipe!r}: {method} has no hyper-parameter {key!r}{nearest(key, known)}; "
                    f"allowed: {allowed}"
                )
            _check_kind(f"recipe {recipe!r}: {method}.{key}", value, hints[key])
            allowed_words = METHODS[method].options.get(key, ())
            if allowed_words and value not in allowed_words:
                raise RecipeError(
                    f"recipe {recipe!r}: {method}.{key} = {value!r} is unknown{nearest(str(value), allowed_words)}; "
                    f"allowed: {', '.join(allowed_words)}"
                )


def build(recipe: str, settings: Settings, setting: Setting) -> Algorithm:
    """The algorithm of a recipe with the given hyper-parameters, checked for the setting. Raises RecipeError."""
    check_settings(recipe, settings)
    components = []
    for method in parse(recipe):
        kind = METHODS[method]
        fields = {field.name for field in dataclasses.fields(kind)}
        known = {key: value for key, value in setting._asdict().items() if key in fields}
        components.append(kind(**known, **settings.get(method, {})))
    leaks = any(component.leak for component in components)  # then the test set is the public split, of any size
    for component in components:
        if component.public and setting.n_public == 0 and not leaks:
            raise RecipeError(
                f"{component.name}: needs a public split, but data.public is 0; set data.public to a number of samples"
            )
        component.check(setting)
    return Algorithm.compose(components)


def _check_kind(where: str, value: object, kind: type) -> None:
    """Numbers must be finite numbers, a flag no number, a word one of text."""
    if kind is float:
        good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    else:
        good = type(value) is kind
    if not good:
        wanted = {float: "a finite number", int: "a whole number", bool: "true or false", str: "text"}[kind]
        raise RecipeError(f"{where} = {value!r} must be {wanted}")
