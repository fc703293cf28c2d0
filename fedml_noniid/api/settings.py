"""Arguments into the settings of params.yaml, which checks them.

Its errors then name the arguments.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedml_noniid.pipelines.experiment import check, config
from fedml_noniid.pipelines.experiment.config import (
    Config,
    DataSettings,
    MachineSettings,
    TrainSettings,
)
from fedml_noniid.pipelines.experiment.scenario import Scenario
from fedml_noniid.plugins import recipes
from fedml_noniid.plugins.core.errors import Mistake, UserError, closest, located
from fedml_noniid.plugins.data.partitions import PARTITIONS

# Of training, what params.yaml has no default for: the values of the default experiment.
TRAIN: dict[str, Any] = {"model": "mlp", "rounds": 40, "epochs": 2, "batch_size": 32, "lr": 0.1}
# begins the name of a user's own partition; the rest is a checksum of its index lists
GIVEN = "given-"
Values = Mapping[str, Any]
Entries = Mapping[str, Values]  # of `recipes` in params.yaml


def options() -> dict[str, str]:
    """Every argument of an experiment -> the section of params.yaml that it belongs to, or
    "method"."""
    dealt = [
        parameter.name
        for partition in PARTITIONS.values()
        for parameter in inspect.signature(partition).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY
    ]
    sections = {
        "data": ("validation", "public"),
        "scenario": (*Scenario.model_fields, *dealt),
        "train": tuple(TrainSettings.model_fields),
        "machine": tuple(MachineSettings.model_fields),
        "method": tuple(recipes.METHODS),
    }
    return {name: section for section, names in sections.items() for name in names}


def of(
    where: str,
    data: Values,
    from_memory: bool,
    entries: Entries,
    seeds: object,
    given: Values,
    name: str = "",
) -> Config:
    """The settings of an experiment with one scenario. UserErrors begin with `where`.

    `data`: the section without its held-out parts. `given`: all other arguments by name. `name`: of
    the scenario, by default that of its partition.
    """
    sections, seeds = _sections(where, entries, given), plain(seeds)
    scenario = sections["scenario"]
    name = name or re.sub(r"[^A-Za-z0-9_+-]", "_", str(scenario["partition"]))
    own: dict[str, Any] = {} if from_memory else dict(data)
    whole = {"validation": 0.0, "public": 0, **own, **sections["data"]}
    own_lists = str(scenario["partition"]).startswith(
        GIVEN
    )  # checked by `partition`; iid stands in for it here
    with arguments(where):
        filled = _with_methods(entries, sections["method"])
        content = {
            "experiment": where,
            # Data from memory were checked when they were made. A data set without options stands
            # in for them here.
            "data": whole | {"name": "digits"} if from_memory else whole,
            "scenario_names": [name],
            "scenarios": {name: scenario | ({"partition": "iid"} if own_lists else {})},
            "recipe_names": list(filled),
            "recipes": filled,
            "seeds": seeds,
            "train": {**TRAIN, **sections["train"]},
            "machine": sections["machine"],
        }
        settings = config.checked(content, config.FILE)
        if from_memory:
            settings = settings.model_copy(
                update={"data": DataSettings.model_construct(**whole, **data)}
            )
        if own_lists:
            given_lists = settings.scenarios[name].model_copy(
                update={"partition": scenario["partition"]}
            )
            settings = settings.model_copy(update={"scenarios": {name: given_lists}})
        if where != "partition":  # which knows no rounds
            check.check_drifts(settings)
        missing = settings.scenarios[name].availability
        if missing is not None:
            with located("availability"):
                missing.read(Path(), settings.train.rounds, settings.scenarios[name].clients)
        composed = {
            recipe: check.compose(settings, recipe, name) for recipe in settings.recipe_names
        }
    leaks = [
        recipe for recipe, algorithm in composed.items() if algorithm.leak and "leak" not in recipe
    ]
    if leaks:  # its name has to say so in every table, as in params.yaml
        named = {
            f"{key}-leak" if key in leaks else key: {"recipe": key, **entry}
            for key, entry in entries.items()
        }
        return of(where, data, from_memory, named, seeds, given, name)
    return settings


def _sections(where: str, entries: Entries, given: Values) -> dict[str, dict[str, Any]]:
    """The arguments by section.

    UserError for an unknown one, and without a partition and clients.
    """
    known = options()
    sections: dict[str, dict[str, Any]] = {section: {} for section in known.values()}
    for key, value in given.items():
        if key not in known:
            raise unknown(
                where, key, [key for key, section in known.items() if section != "method"], entries
            )
        sections[known[key]][key] = plain(value)
    for key in ("partition", "clients"):
        if sections["scenario"].get(key) is None:
            instead = (
                ""
                if where == "partition"
                else ", or what `partition` returned in place of the data"
            )
            raise UserError(f"{where}: {key} is missing; give it{instead}")
    return sections


def unknown(
    where: str, key: str, allowed: Iterable[str], entries: Entries | None = None
) -> UserError:
    """The error for an argument that doesn't exist.

    With `entries`, methods and seeds are allowed too.
    """
    words, more = [*allowed], ""
    if entries is not None:
        words, more = ["seeds", *words], ", and a method's name with its hyper-parameters"
        having = [method for method in recipes.METHODS if key in recipes.hyper_parameters(method)]
        having.sort(key=lambda method: not any(method in entry for entry in entries))
        if having:  # those of the recipe come first
            more += f"; {having[0]} has it: {having[0]}={{{key!r}: ...}}"
    error = UserError(
        "is no argument",
        where=(key,),
        allowed=", ".join(words) + more,
        meant=closest(key, [*words, *(recipes.METHODS if more else ())]),
    )
    return error.below(source=where)


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
def arguments(where: str) -> Iterator[None]:
    """UserErrors inside name arguments of `where` in place of the sections of params.yaml."""
    try:
        yield
    except UserError as error:
        flat = error.changed(lambda one: argument(one, where))
        raise flat from None


def argument(mistake: Mistake, source: str = "") -> Mistake:
    """A mistake in params.yaml as one in the arguments of a function.

    Arguments have the names of the keys, without a section: of scenarios and recipes, there is one.
    """
    sections = {"data": 1, "train": 1, "machine": 1, "scenarios": 2, "recipes": 2}
    skipped = sections.get(str(next(iter(mistake.where), "")), 0)
    return replace(mistake, where=mistake.where[skipped:], source=source)


def _with_methods(entries: Entries, methods: Values) -> dict[str, dict[str, Any]]:
    """The entries, each with the hyper-parameters of its own methods.

    What an entry has itself comes first.
    """
    used: set[str] = set()
    filled = {}
    for name, entry in entries.items():
        own = set(recipes.parse(str(entry.get("recipe") or name))) & methods.keys()
        used |= own
        filled[name] = {
            **{method: methods[method] for method in methods if method in own},
            **plain(entry),
        }
    for method in methods.keys() - used:
        raise UserError("is part of no recipe", where=(method,), allowed=", ".join(entries))
    return filled
