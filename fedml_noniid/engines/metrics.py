"""Metrics of a user's own: functions of a model's outputs and the labels, measured where accuracy
is.

A metric is a function `(outputs [n, C], labels [n], **options) -> number, or name -> number`. Both
are tensors on the CPU: the model's outputs in float32, and the labels as int64, or the targets of
another loss. A number that is not defined is NaN, and its cell stays empty.
"""

from __future__ import annotations

import inspect
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from torch import Tensor

from fedml_noniid.core.errors import UserError, located, shown
from fedml_noniid.core.trees import Params
from fedml_noniid.data.drift import Drift
from fedml_noniid.engines.callbacks import Columns, CurrentRun, RoundEnd, Stateless
from fedml_noniid.engines.evaluation import outputs_of
from fedml_noniid.metrics import METRICS
from fedml_noniid.own_code import call, check_arguments, function_of

LOG = logging.getLogger(__name__)
NAME = re.compile(r"[\w.-]+")  # of a number, as part of a column's name
TAKEN = (*METRICS, "loss")  # names of other columns


@dataclass(frozen=True)
class Metric:
    """A metric with its options."""

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any]

    def __call__(self, outputs: Tensor, labels: Tensor) -> dict[str, float]:
        """The numbers by name: that of the function, if it returns only one.

        `found` [n, C], `labels` [n]: on any device. UserError.
        """
        what = f"metric {self.name!r}"
        copies = outputs.cpu().clone(), labels.cpu().clone()  # which the function may change
        result = call(what, self.function, *copies, **self.options)
        numbers = result if isinstance(result, Mapping) else {self.name: result}
        values = {}
        for name, value in numbers.items():
            if not isinstance(name, str) or not NAME.fullmatch(name) or name in TAKEN:
                allowed = f"letters, digits, '_', '.' and '-', but not {', '.join(TAKEN)}"
                raise UserError(f"{what}: the name {shown(name)} is refused", allowed=allowed)
            if (number := _number(value)) is None:
                allowed = "a finite number or NaN, or names with such numbers"
                raise UserError(f"{what} returned {shown(value)}", allowed=allowed)
            values[name] = number
        return values


def _number(value: Any) -> float | None:
    """A number of Python, or the only one of an array or a tensor; None for all else."""
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (ValueError, RuntimeError):  # it has several
            return None
    is_number = isinstance(value, Real) and not isinstance(value, bool) and not math.isinf(value)
    return float(value) if is_number else None


def metric_of(name: str, options: Mapping[str, Any]) -> Metric:
    """A metric of a function, named as `package.module:name`. UserError."""
    function = function_of("metric", name, {})
    with located(name):
        first = list(inspect.signature(function).parameters)[:2]  # outputs, labels
        check_arguments(function, options, first)
    return Metric(getattr(function, "__name__", type(function).__name__), function, options)


class Measuring(Stateless):
    """Measures metrics on the test set and the validation split.

    Where labels drift, a metric is the mean over all clients, as accuracy is. Where clients keep a
    part of the model, no model here is whole, and nothing is measured in the rounds.
    """

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self.metrics = metrics

    def on_start(self, run: CurrentRun) -> None:
        """Measures w_0: the names are then known, and a function that fails is found early."""
        federation, start = run.federation, run.start
        parts = {"test": federation.test, "validation": federation.validation}
        self._parts = {name: samples for name, samples in parts.items() if samples is not None}
        self._drift = federation.drift
        model = start.task.model(start.params, start.buffers)
        numbers = self._measured(start.task.network, model, 1)
        self._nothing = dict.fromkeys(numbers, math.nan)

    def measure(self, end: RoundEnd) -> Columns:
        if not end.evaluating or end.task.own_models:
            return self._nothing
        return self._measured(end.task.network, end.model, end.number)

    def _measured(
        self, network: Any, model: tuple[Params, Params], round_: int
    ) -> dict[str, float]:
        columns: dict[str, float] = {}
        for part, samples in self._parts.items():
            outputs, views = (
                outputs_of(network, *model, samples),
                views_of(self._drift, samples.y, round_),
            )
            for name, value in measured(self.metrics, outputs, views).items():
                columns[f"{part}_{name}"] = value
        return columns


def views_of(drift: Drift | None, y: Tensor, round_: int) -> Sequence[tuple[float, Tensor]]:
    """(fraction of the clients, their labels [n]) of samples with labels `y` [n] in a round."""
    return [(1.0, y)] if drift is None else drift.views(y, round_)


def measured(
    metrics: Sequence[Metric], outputs: Tensor, views: Sequence[tuple[float, Tensor]]
) -> dict[str, float]:
    """Name -> number of all metrics. UserError for a name that two of them give.

    `found` [n, C]; `views`: (fraction of the clients, their labels [n]); a number is the mean over
    the clients.
    """
    numbers: dict[str, float] = {}
    for metric in metrics:
        by_view = [(share, metric(outputs, y)) for share, y in views]
        for name in by_view[0][1]:
            if name in numbers:
                raise UserError(f"metric {metric.name!r}: another one has the name {name!r} too")
            numbers[name] = sum(share * values[name] for share, values in by_view)
    return numbers


def by_client(
    metrics: Sequence[Metric], names: Iterable[str], tested: Sequence[tuple[Tensor, Tensor]]
) -> dict[str, list[float]]:
    """Name -> number of each client [N], on its own outputs and labels.

    NaN without samples, and where a function fails: it may need all classes, and a client lacks
    some. The log has the reason.
    """
    columns: dict[str, list[float]] = {name: [] for name in names}
    for client, (logits, y) in enumerate(tested):
        numbers: dict[str, float] = {}
        for metric in metrics if len(y) else ():
            try:
                numbers |= metric(logits, y)
            except UserError as error:
                LOG.warning("client %d: %s", client, error)
        for name, values in columns.items():
            values.append(numbers.get(name, math.nan))
    return columns
