"""The measures that describe a scenario to the advisor: its share of clients, and numbers of
statistics.json."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedml_noniid.pipelines.experiment.config import Scenario

Measures = Mapping[str, float]  # name -> value


class Measure(NamedTuple):
    """What a measure is called, and whether only ratios of it count."""

    title: str
    is_size: bool = False  # compared by its logarithm


MEASURES = {
    "clients": Measure("clients", True),
    "share": Measure("fraction of clients per round"),
    "size_mean": Measure("samples per client", True),
    "classes": Measure("classes", True),
    "size_gini": Measure("Gini of sizes"),
    "label_hellinger_mean": Measure("Hellinger distance"),
    "feature_shift": Measure("feature shift"),
    "feature_spread": Measure("feature spread"),
    "class_clarity": Measure("clarity"),
}


def share_of(scenario: Scenario) -> float | None:
    """The fraction of the clients that answer in a round. None if a file lists who is missing."""
    missing = 0.0 if scenario.availability is None else scenario.availability.rate
    return None if missing is None else scenario.cohort / scenario.clients * (1 - missing)


def of(partitions: Sequence[Mapping[str, float]], share: float | None) -> dict[str, float]:
    """The measures of a scenario, each the mean over its partitions (seeds).

    Those that a partition lacks are left out.

    `partitions`: what statistics.json holds. Features are measured on no text.
    """
    every = [{**found, **({} if share is None else {"share": share})} for found in partitions]
    names = [name for name in MEASURES if every and all(name in found for found in every)]
    return {name: statistics.fmean(found[name] for found in every) for name in names}


def missing(measures: Measures) -> list[str]:
    """The titles of the measures that are not there."""
    return [measure.title for name, measure in MEASURES.items() if name not in measures]
