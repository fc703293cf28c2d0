"""The one registry: it turns names into components, and recipes such as "scaffold+fnr" into
algorithms.

`METHODS` has ours. `foreign` finds those of other packages. `method` finds both, and is the
way to a method from its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, TypeVar, get_args, get_origin, get_type_hints

from fedml_noniid import foreign
from fedml_noniid.core.algorithm import Algorithm
from fedml_noniid.core.component import Component, Public, Setting
from fedml_noniid.core.errors import UserError, among, closest, together
from fedml_noniid.core.options import RecipeError, check_options
from fedml_noniid.own_code import is_path, source_of_class
from fedml_noniid.plugins.baselines.apfl import APFL
from fedml_noniid.plugins.baselines.bucketing import Bucketing
from fedml_noniid.plugins.baselines.ccvr import CCVR
from fedml_noniid.plugins.baselines.centralised import Centralised
from fedml_noniid.plugins.baselines.centred_clipping import CentredClipping
from fedml_noniid.plugins.baselines.cfl import CFL
from fedml_noniid.plugins.baselines.datasharing import DataSharing
from fedml_noniid.plugins.baselines.ditto import Ditto
from fedml_noniid.plugins.baselines.dpfedavg import DPFedAvg
from fedml_noniid.plugins.baselines.dpsgd import DPSGD
from fedml_noniid.plugins.baselines.ef21 import EF21
from fedml_noniid.plugins.baselines.ef_sign import EFSign
from fedml_noniid.plugins.baselines.fed3r import Fed3R
from fedml_noniid.plugins.baselines.fedala import FedALA
from fedml_noniid.plugins.baselines.fedasync import FedAsync
from fedml_noniid.plugins.baselines.fedavgm import FedAvgM
from fedml_noniid.plugins.baselines.fedbabu import FedBABU
from fedml_noniid.plugins.baselines.fedbn import FedBN
from fedml_noniid.plugins.baselines.fedbuff import FedBuff
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
from fedml_noniid.plugins.baselines.fedlesam import FedLESAM
from fedml_noniid.plugins.baselines.fednova import FedNova
from fedml_noniid.plugins.baselines.fednsam import FedNSAM
from fedml_noniid.plugins.baselines.fedntd import FedNTD
from fedml_noniid.plugins.baselines.fedopt import FedAdagrad, FedAdam, FedYogi
from fedml_noniid.plugins.baselines.fedper import FedPer
from fedml_noniid.plugins.baselines.fedproto import FedProto
from fedml_noniid.plugins.baselines.fedprox import FedProx
from fedml_noniid.plugins.baselines.fedrep import FedRep
from fedml_noniid.plugins.baselines.fedrod import FedRoD
from fedml_noniid.plugins.baselines.fedrs import FedRS
from fedml_noniid.plugins.baselines.fedsam import FedSAM
from fedml_noniid.plugins.baselines.finetune import FineTune
from fedml_noniid.plugins.baselines.fsl import FSL
from fedml_noniid.plugins.baselines.ifca import IFCA
from fedml_noniid.plugins.baselines.krum import Krum
from fedml_noniid.plugins.baselines.linear_probe import LinearProbe
from fedml_noniid.plugins.baselines.median import Median, TrimmedMean
from fedml_noniid.plugins.baselines.moon import MOON
from fedml_noniid.plugins.baselines.oort import Oort
from fedml_noniid.plugins.baselines.powd import PowD, RPowD
from fedml_noniid.plugins.baselines.qfedavg import QFedAvg
from fedml_noniid.plugins.baselines.qsgd import QSGD
from fedml_noniid.plugins.baselines.rfa import RFA
from fedml_noniid.plugins.baselines.scaffold import Scaffold
from fedml_noniid.plugins.baselines.scaffold_i import ScaffoldI
from fedml_noniid.plugins.baselines.sgdm import SGDM, SGDMLocal, SGDMServer
from fedml_noniid.plugins.baselines.topk import TopK
from fedml_noniid.plugins.ccn.algorithm import CCN
from fedml_noniid.plugins.fednlr.algorithm import FedNLR
from fedml_noniid.plugins.fednnnn.algorithm import FedNNNN
from fedml_noniid.plugins.fnr.algorithm import FNR
from fedml_noniid.plugins.rfedavg.algorithm import RFedAvg, RFedAvgPlus

METHODS: dict[str, type[Component]] = {
    kind.name: kind
    for kind in (
        APFL,
        Bucketing,
        CCN,
        CCVR,
        Centralised,
        CentredClipping,
        CFL,
        DataSharing,
        Ditto,
        DPFedAvg,
        DPSGD,
        EF21,
        EFSign,
        Fed3R,
        FedAdagrad,
        FedAdam,
        FedALA,
        FedAsync,
        FedAvgM,
        FedBABU,
        FedBN,
        FedBuff,
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
        FedLESAM,
        FedNLR,
        FedNNNN,
        FedNova,
        FedNSAM,
        FedNTD,
        FedPer,
        FedProto,
        FedProx,
        FedRep,
        FedRoD,
        FedRS,
        FedSAM,
        FedYogi,
        FineTune,
        FNR,
        FSL,
        IFCA,
        Krum,
        LinearProbe,
        Median,
        MOON,
        Oort,
        PowD,
        QFedAvg,
        QSGD,
        RFA,
        RFedAvg,
        RFedAvgPlus,
        RPowD,
        Scaffold,
        ScaffoldI,
        SGDM,
        SGDMLocal,
        SGDMServer,
        TopK,
        TrimmedMean,
    )
}

K = TypeVar("K", bound=type[Component])
Settings = Mapping[str, Mapping[str, object]]  # method -> hyper-parameter -> value


def method(name: str) -> type[Component]:
    """The class of a method, by its name or by a dotted path. UserError."""
    component = METHODS.get(name) or foreign.find(name, METHODS)
    if component is None:
        known = ["fedavg", *sorted(names())]
        raise UserError(
            f"method {name!r} is unknown",
            **among(name, known, f"or {foreign.A_CLASS}"),
        )
    return component


def names() -> tuple[str, ...]:
    """The names of all methods: ours, and those of other packages, which are not imported."""
    return tuple(dict.fromkeys((*loaded(), *foreign.advertised())))


def loaded() -> dict[str, type[Component]]:
    """The methods that are imported, by name: ours, and those of others that are in use."""
    return {**foreign.known(), **METHODS}


def register(kind: K) -> K:
    """Makes a method of yours known by its name, in this process and in those that it forks.

    Returns the class, so that it may stand above it as a decorator. UserError if it is no
    component, or if its name is taken.

    >>> import fedml_noniid as nd
    >>> from fedml_noniid.plugins.baselines.fedprox import FedProx
    >>> nd.register(FedProx).name  # this one is known already
    'fedprox'
    """
    foreign.register(kind, METHODS)
    return kind


def parse(recipe: str) -> tuple[str, ...]:
    """The method names of a recipe; `"fedavg"` gives none.

    A dotted path gives the name of its class. RecipeError names an unknown method.
    """
    methods: list[str] = []
    for part in recipe.split("+"):
        name = part.strip()
        try:
            methods.append(method(name).name if is_path(name) else _known(name))
        except UserError as error:
            mistakes = [
                replace(mistake, what=f"recipe {recipe!r}: {mistake.what}")
                for mistake in error.mistakes
            ]
            raise RecipeError.from_mistakes(mistakes) from error.__cause__
    if len(set(methods)) < len(methods):
        raise RecipeError(
            f"recipe {recipe!r} names a method twice; a recipe is a set, name each method once"
        )
    return tuple(name for name in methods if name != "fedavg")


def _known(name: str) -> str:
    """A name, if a method has it. UserError."""
    if name != "fedavg":
        method(name)
    return name


def entry(recipe: str) -> tuple[str, dict[str, object]]:
    """(name, content) of the entry of `recipes` for a recipe: a dotted path can't be its name."""
    return ("+".join(parse(recipe)), {"recipe": recipe}) if is_path(recipe) else (recipe, {})


def own_code(recipe: str) -> dict[str, str]:
    """The methods of a recipe that are not ours -> the SHA-256 of their source."""
    return {name: source_of_class(method(name)) for name in parse(recipe) if name not in METHODS}


def hyper_parameters(name: str) -> dict[str, object]:
    """The hyper-parameters of a method, with their defaults."""
    return {field.name: field.default for field in dataclasses.fields(method(name))}


def resolved(recipe: str, settings: Settings) -> dict[str, dict[str, object]]:
    """Method -> all its hyper-parameters: those that are given, and the defaults of the others.

    An empty list is left out unless it is given, so that a new one changes no fingerprint.
    """
    resolved: dict[str, dict[str, object]] = {}
    for name in parse(recipe):
        defaults = hyper_parameters(name).items()
        filled = {key: value for key, value in defaults if value != ()}
        resolved[name] = filled | dict(settings.get(name, {}))
    return resolved


def choices(name: str) -> dict[str, tuple[str, ...]]:
    """The allowed words of each hyper-parameter of a method that takes a word."""
    return {
        key: get_args(hint)
        for key, hint in get_type_hints(method(name)).items()
        if get_origin(hint) is Literal
    }


def check_settings(recipe: str, settings: Settings) -> None:
    """RecipeError with every mistake: a method that is not part of the recipe, a hyper-parameter
    that its method does not have, a value of the wrong kind or range."""
    methods = parse(recipe)
    with together(kind=RecipeError) as checked:
        for name, values in settings.items():
            with checked(name):
                if name not in methods:
                    raise UserError(
                        f"is no method of recipe {recipe!r}",
                        allowed=", ".join(methods) or "none, fedavg has no hyper-parameters",
                        meant=closest(name, methods),
                    )
                check_options(method(name), values)


def build(recipe: str, settings: Settings, setting: Setting) -> Algorithm:
    """The algorithm of a recipe with the given hyper-parameters, checked for the setting.

    Raises RecipeError.
    """
    check_settings(recipe, settings)
    components = []
    for name in parse(recipe):
        values = settings.get(name, {}).items()  # lists of files: a component must be hashable
        options = {key: tuple(value) if isinstance(value, list) else value for key, value in values}
        components.append(method(name)(**options))
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
