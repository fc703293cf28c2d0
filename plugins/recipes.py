"""The one registry: it turns names into components, and recipes such as "scaffold+fnr" into
algorithms."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, get_args, get_origin, get_type_hints

from fedml_noniid.plugins.baselines.ccvr import CCVR
from fedml_noniid.plugins.baselines.centralised import Centralised
from fedml_noniid.plugins.baselines.datasharing import DataSharing
from fedml_noniid.plugins.baselines.fedavgm import FedAvgM
from fedml_noniid.plugins.baselines.fedbabu import FedBABU
from fedml_noniid.plugins.baselines.fedbn import FedBN
from fedml_noniid.plugins.baselines.fedcm import FedCM
from fedml_noniid.plugins.baselines.feddc import FedDC
from fedml_noniid.plugins.baselines.feddecorr import FedDecorr
from fedml_noniid.plugins.baselines.feddf import FedDF
from fedml_noniid.plugins.baselines.feddyn import FedDyn
from fedml_noniid.plugins.baselines.feddyn_authors import FedDynAuthors
from fedml_noniid.plugins.baselines.fedexp import FedExP
from fedml_noniid.plugins.baselines.fedftg import FedFTG
from fedml_noniid.plugins.baselines.fedgen import FedGen
from fedml_noniid.plugins.baselines.fedlc import FedLC
from fedml_noniid.plugins.baselines.fednova import FedNova
from fedml_noniid.plugins.baselines.fedntd import FedNTD
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
from fedml_noniid.plugins.core.errors import UserError, closest, together
from fedml_noniid.plugins.core.options import RecipeError, check_options
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
        FedAvgM,
        FedBABU,
        FedBN,
        FedCM,
        FedDC,
        FedDecorr,
        FedDF,
        FedDyn,
        FedDynAuthors,
        FedExP,
        FedFTG,
        FedGen,
        FedLC,
        FedNLR,
        FedNNNN,
        FedNova,
        FedNTD,
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
            names = ["fedavg", *sorted(METHODS)]
            raise RecipeError(
                f"recipe {recipe!r}: method {name!r} is unknown",
                allowed=", ".join(names),
                meant=closest(name, names),
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
        for key, hint in get_type_hints(METHODS[method]).items()
        if get_origin(hint) is Literal
    }


def check_settings(recipe: str, settings: Settings) -> None:
    """RecipeError with every mistake: a method that is not part of the recipe, a hyper-parameter
    that its method does not have, a value of the wrong kind or range."""
    methods = parse(recipe)
    with together(kind=RecipeError) as checked:
        for method, values in settings.items():
            with checked(method):
                if method not in methods:
                    raise UserError(
                        f"is no method of recipe {recipe!r}",
                        allowed=", ".join(methods) or "none, fedavg has no hyper-parameters",
                        meant=closest(method, methods),
                    )
                check_options(METHODS[method], values)


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
                f"{c.name}: needs a public split, but public is 0; set public to a number of "
                "samples"
            )
    return Algorithm.compose(components, setting)
