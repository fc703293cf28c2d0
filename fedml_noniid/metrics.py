"""How metrics are written, and which of a run is the main one. Torch is not imported here.

Text, tables, pictures and MLflow's runs of methods have accuracies in percent. Files of numbers,
data frames and MLflow's runs of seeds have fractions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Metric(NamedTuple):
    """How a metric is written."""

    label: str
    percent: bool  # whether it is a fraction that is shown in percent
    least: float = -math.inf  # that it can be
    most: float = math.inf

    @property
    def unit(self) -> str:
        """What stands behind its name in a title."""
        return ", %" if self.percent else ""

    @property
    def sign(self) -> str:
        """What stands behind the number."""
        return " %" if self.percent else ""

    @property
    def factor(self) -> int:
        """From the number to what is shown."""
        return 100 if self.percent else 1

    @property
    def decimals(self) -> int:
        """Of what is shown."""
        return 2 if self.percent else 4

    def number(self, value: float, sign: str = "") -> str:
        """What is shown: `91.00`, `0.9100`; with `sign` "+": `+1.00`."""
        return f"{self.factor * value:{sign}.{self.decimals}f}"

    def shown(self, value: float) -> str:
        """The number with its unit: `91.00 %`, `0.9100`."""
        return f"{self.number(value)}{self.sign}"


METRICS: Mapping[str, Metric] = {
    "accuracy": Metric("accuracy", True, 0, 1),
    "r2": Metric("R²", False, most=1),
    "mae": Metric("mean absolute error", False, 0),
    "rmse": Metric("root mean squared error", False, 0),
    "macro_f1": Metric("macro-F1", True, 0, 1),
    "micro_f1": Metric("micro-F1", True, 0, 1),
    "token_accuracy": Metric("token accuracy", True, 0, 1),
    "perplexity": Metric("perplexity", False, 1),
    "auc": Metric("AUC", False, 0, 1),
}


def main_of(row: Iterable[str]) -> str:
    """The main metric of a run, by the columns of its rounds.csv: the first that is tested."""
    tested = (name.removeprefix("test_") for name in row if name.startswith("test_"))
    return next(name for name in tested if name not in ("loss", "samples"))


def metric_of(name: str) -> Metric:
    """How a metric is written, also one of a loss of your own."""
    return METRICS.get(name, Metric(name, False))
