"""Arguments into the settings of params.yaml, which checks them.

Its errors then name the arguments.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedml_noniid import models
from fedml_noniid.core.errors import Mistake, UserError, among, closest
from fedml_noniid.data import partitions
from fedml_noniid.data.partitions import PARTITIONS, own
from fedml_noniid.own_code import name_of, names_code
from fedml_noniid.pipelines.experiment import check, config
from fedml_noniid.pipelines.experiment.config import (
    Config,
    DataSettings,
    MachineSettings,
    TrainSettings,
)
from fedml_noniid.pipelines.experiment.scenario import OF_RUN as SCENARIO_OF_RUN
from fedml_noniid.pipelines.experiment.scenario import Scenario
from fedml_noniid.plugins import registry

if TYPE_CHECKING:
    from fedml_noniid.api.data import Data

# Of training, what params.yaml has no default for: the values of the default experiment.
TRAIN: dict[str, Any] = {"rounds": 40, "epochs": 2, "batch_size": 32, "lr": 0.1}
# begins the name of a user's own partition; the rest is a checksum of its index lists
GIVEN = "given-"
OF_RUN = ("participation", *SCENARIO_OF_RUN)  # of a scenario, these change no split
Values = Mapping[str, Any]
Entries = Mapping[str, Values]  # of `recipes` in params.yaml


def sections(caller: str = "run") -> dict[str, str]:
    """Every setting that `caller` takes -> the section of params.yaml that it belongs to, or
    "method"."""
    of_partitions = [
        parameter.name
        for partition in PARTITIONS.values()
        for parameter in inspect.signature(partition).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    # A setting comes before a method of another package that is called like it.
    names = {
        "method": registry.names(),
        "seeds": ("seeds",),
        "data": ("validation", "public"),
        "scenario": (*Scenario.model_fields, *of_partitions),
        "train": tuple(TrainSettings.model_fields),
        "machine": tuple(MachineSettings.model_fields),
    }
    section_of = {name: section for section, listed in names.items() for name in listed}
    if caller != "partition":
        return section_of
    of_split = ("data", "scenario")
    return {"seed": "seeds"} | {
        name: section
        for name, section in section_of.items()
        if section in of_split and name not in OF_RUN
    }


def from_arguments(
    caller: str, data: Data, entries: Entries, options: Values, name: str = ""
) -> Config:
    """The settings of an experiment with one scenario. UserErrors begin with `caller`.

    `options`: all arguments by name; None counts as not given. `name`: of the scenario, by default
    that of its partition.
    """
    with arguments(caller):
        entries = _named(entries)
    by_section = _by_section(caller, entries, options)
    scenario, (seeds,) = by_section["scenario"], by_section["seeds"].values()
    name = name or re.sub(r"[^A-Za-z0-9_+-]", "_", str(scenario["partition"]))
    held_out = {"validation": 0.0, "public": 0, **by_section["data"]}
    with arguments(caller):
        filled = _with_methods(entries, by_section["method"])
        content = {
            "experiment": caller,
            "data": {**held_out, **data.settings},
            "scenario_names": [name],
            "scenarios": {name: scenario},
            "recipe_names": list(filled),
            "recipes": filled,
            "seeds": seeds,
            "train": _training_of(data, {**TRAIN, **by_section["train"]}),
            "machine": by_section["machine"],
        }
        settings = checked(content, data.from_memory)
        if caller != "partition":  # which knows no rounds
            check.check_drifts(settings)
        settings.scenarios[name].read_files(Path(), settings.train.rounds)
        return _named_leaks(settings)


def checked(content: Mapping[str, Any], from_memory: bool) -> Config:
    """The settings with this content, one scenario. UserError.

    `partition` has checked index lists, and data from memory were checked when they were made.
    Others stand in for them.
    """
    ((name, scenario),), data = content["scenarios"].items(), content["data"]
    has_lists = str(scenario["partition"]).startswith(GIVEN)
    held_out = {key: data[key] for key in ("validation", "public")}
    stand_ins = {
        "data": {"name": "digits", **held_out} if from_memory else data,
        "scenarios": {name: {**scenario, **({"partition": "iid"} if has_lists else {})}},
    }
    settings = config.checked({**content, **stand_ins}, config.FILE)
    own = settings.scenarios[name].model_copy(update={"partition": scenario["partition"]})
    return settings.model_copy(
        update={
            "data": DataSettings.model_construct(**data) if from_memory else settings.data,
            "scenarios": {name: own},
        }
    )


def _training_of(data: Data, train: Values) -> dict[str, Any]:
    """The settings of training, with a model that fits the data, and with their inputs for a
    network of the user's own."""
    train = {"model": models.model_for(data.dataset.train_x.shape[1:]), **train}
    inputs = {name: spec.model_dump() for name, spec in data.dataset.inputs.items()}
    is_ours = train["model"] in models.MODELS
    return train if is_ours or not inputs else {"inputs": inputs, **train}


def _named(entries: Entries) -> Entries:
    """The entries, of which none has a dotted path as its name. Methods of other packages are
    known from here on. RecipeError."""
    named: dict[str, Values] = {}
    for key, values in entries.items():
        registry.parse(str(values.get("recipe") or key))
        name, content = (key, {}) if "recipe" in values else registry.entry(key)
        if name in named:
            raise UserError(f"recipe {key} is named twice", allowed="once")
        named[name] = content | dict(values)
    return named


def _named_leaks(settings: Config) -> Config:
    """The settings with `-leak` in the name of each recipe that leaks, for every table.

    params.yaml asks for such a name. UserError for recipes that can't be composed.
    """
    (scenario,) = settings.scenario_names
    names = {}
    for recipe in settings.recipe_names:
        leaks = check.compose(settings, recipe, scenario).leak and "leak" not in recipe
        names[recipe] = f"{recipe}-leak" if leaks else recipe
    entries = {
        name: settings.recipes[recipe].model_copy(update={"recipe": settings.composition(recipe)})
        for recipe, name in names.items()
    }
    return settings.model_copy(update={"recipe_names": [*entries], "recipes": entries})


def _by_section(caller: str, entries: Entries, options: Values) -> dict[str, dict[str, Any]]:
    """The arguments by section.

    UserError for an unknown one, and without a partition and clients.
    """
    with arguments(caller):
        known = sections(caller) | _own_options(options.get("partition"))
    by_section: dict[str, dict[str, Any]] = {section: {} for section in sections().values()}
    for key, value in options.items():
        if key not in known:
            raise _unknown(caller, key, known, entries)
        if value is not None or known[key] == "seeds":
            by_section[known[key]][key] = named_code(key, value)
    for key in ("partition", "clients"):
        if key not in by_section["scenario"]:
            instead = ", or what `partition` returned in place of the data"
            instead = "" if caller == "partition" else instead
            raise UserError(f"{caller}: {key} is missing; give it{instead}")
    return by_section


def _own_options(partition: object) -> dict[str, str]:
    """The options of a user's own partition, with their section. Wrong ones are found later."""
    name = _name_of(partition)
    if not names_code(name):
        return {}
    names = inspect.signature(partitions.find(name)).parameters
    return {option: "scenario" for option in names if option not in own.FILLED}


def named_code(key: str, value: Any) -> Any:
    """The value of an argument, with names in place of the functions that a user gives."""
    if key == "model":
        return models.name_of(value)
    if key == "partition":
        return _name_of(value)
    if key != "metrics":
        return plain(value)
    if isinstance(value, Mapping):
        return {_name_of(metric): plain(options) for metric, options in value.items()}
    return [*map(_name_of, value if isinstance(value, list | tuple) else [value])]


def _name_of(function: Any) -> Any:
    return name_of(function) if callable(function) else function


def _unknown(caller: str, key: str, known: Mapping[str, str], entries: Entries) -> UserError:
    """The error for an argument that doesn't exist."""
    hints = among(key, (name for name, section in known.items() if section != "method"))
    hints["meant"] = closest(key, known)
    if caller != "partition":
        hints["allowed"] += ", and a method's name with its hyper-parameters"
        having = [
            method for method in registry.loaded() if key in registry.hyper_parameters(method)
        ]
        having.sort(key=lambda method: not any(method in entry for entry in entries))
        if having:  # those of the recipe come first
            hints["allowed"] += f"; {having[0]} has it: {having[0]}={{{key!r}: ...}}"
    return UserError("is no argument", path=(key,), **hints).below(source=caller)


def plain(value: Any) -> Any:
    """Numbers of NumPy as Python's, and sequences as lists, as a file of settings has them."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | range):
        return [plain(inner) for inner in value]
    return value


@contextmanager
def arguments(caller: str) -> Iterator[None]:
    """UserErrors inside name arguments of `caller` in place of keys of params.yaml.

    They are the keys without their section: of scenarios and recipes, there is one.
    """
    depths = {"data": 1, "train": 1, "machine": 1, "scenarios": 2, "recipes": 2}

    def flat(mistake: Mistake) -> Mistake:
        skipped = depths.get(str(next(iter(mistake.path), "")), 0)
        return replace(mistake, path=mistake.path[skipped:], source=caller)

    try:
        yield
    except UserError as error:
        raise error.changed(flat) from None


def check_axes(caller: str, entries: Entries, axes: Mapping[str, list[Any]]) -> None:
    """UserError if an entry has a value of its own for what `axes` varies: it comes first."""
    section_of = sections(caller)
    for (axis, values), (name, entry) in itertools.product(axes.items(), entries.items()):
        is_method = section_of.get(axis) == "method"
        varied = {axis}
        if is_method:
            varied = {key for value in values if isinstance(value, Mapping) for key in value}
        set_itself = entry.get(axis if is_method else "train")
        if isinstance(set_itself, Mapping) and (shared := varied & {*set_itself}):
            raise UserError(
                f"{caller}: over: {axis} is refused, as recipe {name!r} has "
                f"{', '.join(sorted(shared))} of its own; allowed: one of them"
            )


def _with_methods(entries: Entries, methods: Values) -> dict[str, dict[str, Any]]:
    """The entries, each with the hyper-parameters of its own methods.

    What an entry has itself comes first.
    """
    filled = {}
    for name, entry in entries.items():
        own = registry.parse(str(entry.get("recipe") or name))
        common = {method: values for method, values in methods.items() if method in own}
        filled[name] = common | plain(entry)
        for method in common.keys() & entry.keys():
            if isinstance(common[method], Mapping) and isinstance(entry[method], Mapping):
                filled[name][method] = {**common[method], **filled[name][method]}
    for method in methods:
        if not any(method in entry for entry in filled.values()):
            raise UserError("is part of no recipe", path=(method,), allowed=", ".join(entries))
    return filled
