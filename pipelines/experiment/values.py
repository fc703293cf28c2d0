"""Describes values that were chosen: in words, beside the others that were tried, and by the hash
of the settings under which they were chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedml_noniid.pipelines.experiment.config import Axes, Config, Values
from fedml_noniid.pipelines.experiment.provenance import digest

# Settings of `train` that choose no values: how a machine computes, what it measures and saves.
OF_MACHINE = {"engine", "device", "threads", "observe", "evaluate_every", "save"}


def in_words(values: Mapping[str, Mapping[str, Any]]) -> str:
    """`lr 0.1, fnr.p 0.5`: those of `train` by their key alone."""
    return ", ".join(
        f"{key if section == 'train' else f'{section}.{key}'} {values[section][key]}"
        for section, key in cells(values)
    )


def edges(values: Values, tried: Axes) -> list[str]:
    """`lr 0.3 is the largest`, for each number that is at an end of those tried."""
    return [
        f"{in_words({section: {key: values[section][key]}})} is the {end}"
        for section, key in cells(values)
        if (end := edge(values[section][key], tried[section][key]))
    ]


def cells(sections: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Returns (section, key) of all values."""
    return [(section, key) for section, keys in sections.items() for key in keys]


def numbers(values: Iterable[Any]) -> list[float]:
    """Returns those values that are numbers."""
    return [x for x in values if isinstance(x, int | float) and not isinstance(x, bool)]


def edge(value: Any, tried: Sequence[Any]) -> str | None:
    """`smallest` or `largest`, if a number is at an end of at least two."""
    ends = numbers(tried)
    if len(ends) < 2 or not numbers([value]) or min(ends) < value < max(ends):
        return None
    return "smallest" if value == min(ends) else "largest"


def fingerprint(settings: Config, recipe: str, chosen: Values, scenario: str) -> str:
    """Hash of the settings under which values were chosen: data, scenario, training, the recipe's
    other values."""
    others = {
        section: {key: value for key, value in keys.items() if key not in chosen.get(section, {})}
        for section, keys in settings.recipes[recipe].values.items()
    }
    return digest(
        settings.data.model_dump(exclude={"root"}),
        settings.scenarios[scenario].model_dump() if scenario in settings.scenarios else None,
        settings.train.model_dump(exclude=OF_MACHINE | set(chosen.get("train", {}))),
        settings.composition(recipe),
        {section: keys for section, keys in others.items() if keys},
    )
