"""Which values each method ran at, and how they were chosen; `chosen.md.j2` has the sentences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedml_noniid.metrics import metric_of
from fedml_noniid.pipelines.experiment.config import Config, Tuned
from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.experiment.values import edges, fingerprint, in_words
from fedml_noniid.pipelines.reporting.text import NONE, seeds
from fedml_noniid.plugins import registry

YES, CHANGED, OTHER, NO = "yes", "values changed since", "other settings", "no"
TINY = 1e-6  # the record of a tuning has six digits


@dataclass(frozen=True)
class Chosen:
    """The values of one method, and how they were chosen."""

    name: str
    values: str  # `lr 0.3, fnr.p 0.5`, "" for none
    changed: tuple[str, ...]  # hyper-parameters that are not at the default of their file
    tuned: Tuned | None
    state: str  # whether the values are those that tuning chose, at the settings of today

    @property
    def on(self) -> str:
        """The samples that a tuning measured on."""
        assert self.tuned is not None
        tuned = self.tuned
        return f"{tuned.scenario}, {seeds(tuned.seeds)}, {tuned.samples} samples"

    @property
    def edges(self) -> list[str]:
        """The chosen numbers that are the smallest or the largest of those tried."""
        if self.tuned is None:
            return []
        return edges(self.tuned.chosen, self.tuned.tried)

    @property
    def budget(self) -> int | None:
        """The number of trials that the grid and `trials` gave it."""
        return None if self.tuned is None else self.tuned.trials - self.tuned.extended

    @property
    def is_close(self) -> bool:
        """Whether it is at most one validation sample ahead of the second best."""
        if self.tuned is None or self.tuned.runner_up is None:
            return False
        step = 1 / self.tuned.samples if self.tuned.metric == "accuracy" else 0.0
        return self.tuned.validation - self.tuned.runner_up <= step + TINY


def chosen(settings: Config) -> list[Chosen]:
    """The values of each method of params.yaml."""
    return [
        Chosen(
            name,
            in_words(_values(settings, name)),
            tuple(_changed(settings, name)),
            settings.recipes[name].tuned,
            _state(settings, name),
        )
        for name in settings.recipe_names
    ]


def table(methods: Sequence[Chosen]) -> list[list[str]]:
    """The values of each method, and how they were chosen."""
    metric = metric_of(
        next((method.tuned.metric for method in methods if method.tuned), "accuracy")
    )
    unit = ", %" if metric.percent else f", {metric.label}"
    rows = [["method", "values", "tuned", "trials of all", "on", f"validation{unit} (second)"]]

    def shown(value: float) -> str:
        return f"{metric.factor * value:.{metric.decimals}f}"

    for method in methods:
        row = [method.name, method.values or NONE, method.state, NONE, NONE, NONE]
        if (record := method.tuned) is not None:
            diverged = f", {record.diverged} diverged" if record.diverged else ""
            second = NONE if record.runner_up is None else shown(record.runner_up)
            points = math.prod(len(x) for keys in record.tried.values() for x in keys.values())
            row[3:] = [
                f"{record.trials} of {points}{diverged}",
                method.on,
                f"{shown(record.validation)} ({second})",
            ]
        rows.append(row)
    return rows


def unequal(runs: Iterable[ItemResult]) -> list[str]:
    """`lr (0.1: fedavg; 0.05: scaffold)` for each training setting that was not the same for all,
    by the runs."""
    runs, lines = list(runs), []
    for key in sorted({key for run in runs for key in run.params if key.startswith("train.")}):
        methods: dict[str, dict[str, None]] = {}  # by value
        for run in runs:
            methods.setdefault(str(run.params.get(key)), {})[run.recipe] = None
        if len(methods) > 1:
            listed = "; ".join(f"{value}: {', '.join(names)}" for value, names in methods.items())
            lines.append(f"{key.removeprefix('train.')} ({listed})")
    return lines


def _values(settings: Config, name: str) -> dict[str, dict[str, object]]:
    """The values that a method has for itself. A training setting that any method has for itself
    is shown for all."""
    entries = [settings.recipes[recipe] for recipe in settings.recipe_names]
    keys = [
        key
        for key in type(entries[0].train).model_fields
        if any(key in entry.train.overrides for entry in entries)
    ]
    train = settings.train_of(name)
    return {"train": {key: getattr(train, key) for key in keys}, **settings.recipes[name].settings}


def _changed(settings: Config, name: str) -> Iterable[str]:
    for method, values in settings.recipes[name].settings.items():
        defaults = registry.hyper_parameters(method)
        for key, value in values.items():
            if value != defaults[key]:
                yield f"{name} {key} {value} (default {defaults[key]})"


def _state(settings: Config, name: str) -> str:
    entry = settings.recipes[name]
    if entry.tuned is None:
        return NO
    chosen, values = entry.tuned.chosen, entry.values
    if any(
        values.get(section, {}) | keys != values.get(section) for section, keys in chosen.items()
    ):
        return CHANGED
    now = fingerprint(settings, name, chosen, entry.tuned.scenario)
    return YES if now == entry.tuned.settings else OTHER
