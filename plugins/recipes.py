"""The one registry: it turns names into components, and recipes such as "scaffold+fnr" into
algorithms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

from fedml_noniid.plugins.baselines.ccvr import CCVR
from fedml_noniid.plugins.baselines.centralised import Centralised
from fedml_noniid.plugins.baselines.datasharing import DataSharing
from fedml_noniid.plugins.baselines.fedbabu import FedBABU
from fedml_noniid.plugins.baselines.fedbn import FedBN
from fedml_noniid.plugins.baselines.feddc import FedDC
from fedml_noniid.plugins.baselines.feddf import FedDF
from fedml_noniid.plugins.baselines.feddyn import FedDyn
from fedml_noniid.plugins.baselines.feddyn_authors import FedDynAuthors
from fedml_noniid.plugins.baselines.fedftg import FedFTG
from fedml_noniid.plugins.baselines.fedgen import FedGen
from fedml_noniid.plugins.baselines.fedlc import FedLC
from fedml_noniid.plugins.baselines.fednova import FedNova
from fedml_noniid.plugins.baselines.fedopt import FedAdagrad, FedAdam, FedYogi
from fedml_noniid.plugins.baselines.fedprox import FedProx
from fedml_noniid.plugins.baselines.fedrs import FedRS
from fedml_noniid.plugins.baselines.moon import MOON
from fedml_noniid.plugins.baselines.qfedavg import QFedAvg
from fedml_noniid.plugins.baselines.scaffold import Scaffold
from fedml_noniid.plugins.baselines.scaffold_i import ScaffoldI
from fedml_noniid.plugins.baselines.sgdm import SGDM, SGDMLocal, SGDMServer
from fedml_noniid.plugins.ccn.algorithm import CCN
from fedml_noniid.plugins.core.algorithm import Algorithm
from fedml_noniid.plugins.core.component import Component, Public, Setting
from fedml_noniid.plugins.core.errors import nearest, shown
from fedml_noniid.plugins.core.options import RecipeError, fault, hints
from fedml_noniid.plugins.fednlr.algorithm import FedNLR
from fedml_noniid.plugins.fednnnn.algorithm import FedNNNN
from fedml_noniid.plugins.fnr.algorithm import FNR
from fedml_noniid.plugins.fnr.authors import FNRAuthors
from fedml_noniid.plugins.rfedavg.algorithm import RFedAvg, RFedAvgPlus
from fedml_noniid.plugins.rfedavg.authors import RFedAvgAuthors, RFedAvgPlusAuthors

METHODS: dict[str, type[Component]] = {
    kind.name: kind
    for kind in (
        CCN,
        CCVR,
        Centralised,
        DataSharing,
        FedAdagrad,
        FedAdam,
        FedBABU,
        FedBN,
        FedDC,
        FedDF,
        FedDyn,
        FedDynAuthors,
        FedFTG,
        FedGen,
        FedLC,
        FedNLR,
        FedNNNN,
        FedNova,
        FedProx,
        FedRS,
        FedYogi,
        FNR,
        FNRAuthors,
        MOON,
        QFedAvg,
        RFedAvg,
        RFedAvgAuthors,
        RFedAvgPlus,
        RFedAvgPlusAuthors,
        Scaffold,
        ScaffoldI,
        SGDM,
        SGDMLocal,
        SGDMServer,
    )
}

Settings = Mapping[str, Mapping[str, object]]  # method -> hyper-parameter -> value


def parse(recipe: str) -> tuple[str, ...]:
    """The method names of a recipe; `"fedavg"` gives none. RecipeError names an unknown method."""
    names = [name.strip() for name in recipe.split("+")]
    for name in names:
        if name not in METHODS and name != "fedavg":
            raise RecipeError(
                f"recipe {recipe!r}: method {name!r} is "
                f"unknown{nearest(name, ['fedavg', *METHODS])}; "
                f"allowed: fedavg, {', '.join(sorted(METHODS))}"
            )
    if len(set(names)) < len(names):
        raise RecipeError(
            f"recipe {recipe!r} names a method twice; a recipe is a set, name each method once"
        )
    return tuple(name for name in names if name != "fedavg")


def hyper_parameters(method: str) -> dict[str, object]:
    """The hyper-parameters of a method, with their defaults."""
    return {field.name: field.default for field in dataclasses.fields(METHODS[method])}


def words(method: str) -> dict[str, tuple[str, ...]]:
    """The allowed words of each hyper-parameter of a method that takes a word."""
    return {
        key: get_args(hint)
        for key, hint in hints(METHODS[method]).items()
        if get_origin(hint) is Literal
    }


def check_settings(recipe: str, settings: Settings) -> None:
    """RecipeError for a hyper-parameter that no method of the recipe has, or a value of the wrong
    kind or range."""
    methods = parse(recipe)
    for method, values in settings.items():
        if method not in methods:
            allowed = ", ".join(methods) or "none, fedavg has no hyper-parameters"
            raise RecipeError(
                f"recipe {recipe!r}: settings for {method!r}{nearest(method, methods)}, which "
                "is not part of it; "
                f"allowed: {allowed}"
            )
        _check(recipe, method, values)


def build(recipe: str, settings: Settings, setting: Setting) -> Algorithm:
    """The algorithm of a recipe with the given hyper-parameters, checked for the setting.

    Raises RecipeError.
    """
    check_settings(recipe, settings)
    components = [METHODS[method](**settings.get(method, {})) for method in parse(recipe)]
    leaks = any(c.needs.public is Public.TEST_SET for c in components)
    for c in components:
        if c.needs.public in (Public.UNLABELLED, Public.LABELLED) and not (
            setting.n_public or leaks
        ):
            raise RecipeError(
                f"{c.name}: needs a public split, but data.public is 0; set data.public to a "
                "number of samples"
            )
    return Algorithm.compose(components, setting)


def _check(recipe: str, method: str, values: Mapping[str, Any]) -> None:
    """RecipeError for an unknown hyper-parameter, or a value of the wrong kind, word or range."""
    known = hints(METHODS[method])
    for key, value in values.items():
        if key not in known:
            variants = [name for name, kind in METHODS.items() if issubclass(kind, METHODS[method])]
            having = [name for name in variants if key in hyper_parameters(name)]
            raise RecipeError(
                f"recipe {recipe!r}: {method} has no hyper-parameter {key!r}{nearest(key, known)}; "
                f"allowed: {', '.join(known) or 'none'}{f'; {having[0]} has it' if having else ''}"
            )
        if wrong := fault(known[key], value):
            raise RecipeError(f"{method}: {key} = {shown(value)} {wrong}")
