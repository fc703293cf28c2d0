"""Evaluates contrasts: the number that each seed gives to a cell of a table or to a claim.

A contrast takes a statistic of the runs at one or several addresses and makes one number of them
for each seed. Methods are paired by seed: a seed counts where all its runs have the statistic.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd
from scipy.stats import linregress

from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.experiment.counts import kappa
from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.reporting.comparison import Comparison, paired
from fedml_noniid.pipelines.reporting.summary import Spread, spread, test_samples
from research.runs import Measured

COLUMNS = ["seed", "number", "role", "scenario", "recipe", "value", "item"]
ALLOWED = (
    "final, best, lastN, seconds, seconds_per_round, kappa, rounds_to:0.9, mean:COLUMN, "
    "first5:COLUMN, recorded:KEY:CLIENT, n_over_e, neuron_drift, a number of metrics.json, a "
    "column of rounds.csv"
)


class Contrast(NamedTuple):
    """One number per seed.

    `kind` is `level` (the value at the first address), `difference` and `ratio` (of two), `same`
    (1 if two runs end with the same weights, else 0), or `slope`: of the values, or of the
    differences of successive pairs, over the numbers `over`.
    """

    description: str  # "sim0: rfedavg_plus less fedavg"
    kind: str
    places: Sequence[tuple[str, Mapping[str, Any]]]  # role, address
    statistic: str = "final"
    scale: float = 1
    over: Sequence[float] = ()

    def number(self, values: Sequence[float], runs: Sequence[ItemResult]) -> float:
        """The number of one seed, from the values of its runs."""
        if self.kind == "level":
            return values[0]
        if self.kind == "difference":
            return values[0] - values[1]
        if self.kind == "ratio":
            return values[0] / values[1] if values[1] else math.nan
        if self.kind == "same":
            return float(runs[0].tags["weights_sha256"] == runs[1].tags["weights_sha256"])
        y = list(values)
        if len(y) > len(self.over):
            y = [first - other for first, other in zip(y[::2], y[1::2], strict=True)]
        return float(linregress(self.over, y).slope) if max(y) > min(y) else 0.0


def evaluate(contrast: Contrast, measured: Measured) -> pd.DataFrame:
    """A line for each value behind the numbers: COLUMNS. Numbers that are not finite are left
    out."""
    by_place: list[dict[int, tuple[float, ItemResult]]] = []
    for _, at in contrast.places:
        per_seed = {}
        for run in measured.group(at).runs:
            is_same = contrast.kind == "same"
            value = 0.0 if is_same else statistic(contrast.statistic, run, measured, at["study"])
            if value is not None:
                per_seed[run.seed] = (contrast.scale * value, run)
        by_place.append(per_seed)
    lines: list[tuple[object, ...]] = []
    for seed in sorted(set.intersection(*map(set, by_place))):
        values, runs = zip(*(per_seed[seed] for per_seed in by_place), strict=True)
        number = contrast.number(values, runs)
        if math.isfinite(number):
            lines += [
                (seed, number, role, at["scenario"], at["recipe"], value, run.key)
                for (role, at), value, run in zip(contrast.places, values, runs, strict=True)
            ]
    return pd.DataFrame(lines, columns=COLUMNS)


def by_seed(lines: pd.DataFrame) -> dict[int, float]:
    """The number of each seed."""
    return dict(zip(lines["seed"], lines["number"], strict=True))


def level(
    measured: Measured, at: Mapping[str, Any], name: str = "final", scale: float = 1
) -> dict[int, float]:
    """A statistic of the runs at an address, by seed."""
    return by_seed(evaluate(Contrast("", "level", [("of", at)], name, scale), measured))


def value(
    measured: Measured, at: Mapping[str, Any], name: str = "final", scale: float = 1
) -> Spread | None:
    """Mean and spread over seeds of a statistic at an address; None without a value."""
    return spread(level(measured, at, name, scale).values())


def gain(
    measured: Measured,
    at: Mapping[str, Any],
    less: Mapping[str, Any],
    name: str = "final",
    scale: float = 1,
) -> Comparison | None:
    """The paired test of a statistic against that of the run at `less` with the same seed.

    Both have the same partition and first weights, so the spread of those over seeds drops out.
    None without a value, and if a seed of either diverged: the other seeds' mean would be too high.
    """
    group = measured.group(at)
    if group.diverged or measured.group(less).diverged:
        return None
    ours, theirs = (level(measured, each, name, scale) for each in (at, less))
    if not ours.keys() & theirs.keys():
        return None
    return paired("", ours, theirs, abs(scale) * step(name, group.runs))


def step(name: str, runs: Sequence[ItemResult]) -> float:
    """What one sample of the test set, or one round, makes of a statistic of runs; 0 if that is
    not known."""
    if ROUNDS_TO.fullmatch(name):
        return 1.0
    samples = test_samples(runs) if ACCURACY.fullmatch(name) else None
    return 1 / samples if samples else 0.0


def statistic(name: str, run: ItemResult, measured: Measured, study: str) -> float | None:
    """A statistic of one run, as ALLOWED lists them. None if the run lacks it.

    `rounds_to` is the number of rounds plus one where the accuracy is never reached. UserError for
    an unknown pattern, and for what is no number.
    """
    for pattern, read in PATTERNS:
        if matched := pattern.fullmatch(name):
            return read(run, measured, study, *matched.groups())
    if ":" in name:
        raise UserError(f"statistic {name!r} is unknown; allowed: {ALLOWED}")
    number = run.evaluation.get(name, next(reversed(run.column(name)), None))
    if number is not None and not isinstance(number, int | float):
        raise UserError(f"statistic {name!r} is no number; allowed: {ALLOWED}")
    return float(number) if number is not None and math.isfinite(number) else None


def _accuracy(run: ItemResult, measured: Measured, study: str, which: str, n: str) -> float:
    accuracy = run.column("test_accuracy")
    if which == "best":
        return max(accuracy)
    return statistics.fmean(accuracy[-int(n) :]) if n else accuracy[-1]


def _time(run: ItemResult, measured: Measured, study: str, which: str) -> float | None:
    if not run.seconds:
        return None
    if which == "seconds_per_round":
        return statistics.fmean(run.seconds)
    total = sum(run.seconds)
    return total if which == "seconds" else kappa(run.column("test_accuracy")[-1], total)


def _rounds_to(run: ItemResult, measured: Measured, study: str, accuracy: str) -> float:
    rounds = [int(row["round"]) for row in run.rows if row["test_accuracy"] >= float(accuracy)]
    return float(min(rounds, default=len(run.rows) + 1))


def _mean(run: ItemResult, measured: Measured, study: str, n: str, column: str) -> float | None:
    values = run.column(column)[: int(n) if n else None]
    return statistics.fmean(values) if values else None


def _recorded(
    run: ItemResult, measured: Measured, study: str, key: str, client: str
) -> float | None:
    tensor = measured.recorded(run, study).get(key)
    if tensor is None or tensor.shape[-1] <= int(client):
        return None
    return float(tensor[..., int(client)].double().mean())


def _n_over_e(run: ItemResult, measured: Measured, study: str) -> float | None:
    """FedNNNN: the server's step by the clients' mean step, mean over the rounds."""
    steps = [(row["update_norm_server"], row["update_norm_client"]) for row in run.rows]
    fractions = [server / client for server, client in steps if client]
    return statistics.fmean(fractions) if fractions else None


def _neuron_drift(run: ItemResult, measured: Measured, study: str) -> float | None:
    """FedNLR's table 4 over all clients: the mean change of bound neurons' activations on the
    classes that they lack.

    A neuron is bound to the class on which its mean activation is the highest before the last
    round's training. Every client has one class. None if no neuron is bound to a class that a
    client lacks.
    """
    recorded = measured.recorded(run, study)
    samples = measured.client_samples(study, run.scenario, run.seed)
    if samples is None or "fednlr/before" not in recorded:
        return None
    before, after = (  # [M, C, H]
        recorded[f"fednlr/{when}"][-1].double().numpy() for when in ("before", "after")
    )
    changes: list[float] = []
    for row, client in enumerate(recorded["round/clients"][-1].tolist()):
        for neuron, label in enumerate(before[row].argmax(0)):
            is_dead = before[row, :, neuron].max() <= 0
            if not is_dead and samples.counts[client, label] == 0:
                changes.append(float(after[row, label, neuron] - before[row, label, neuron]))
    return statistics.fmean(changes) if changes else None


# Statistics that are accuracies, or deviations of them. All data sets of the claims have ten
# classes.
ACCURACY = re.compile(
    r"final|best|last\d+|(first\d+|mean):test_accuracy|client_worst|\w*accuracy\w*"
)
ROUNDS_TO = re.compile(r"rounds_to:(0\.\d+)")
PATTERNS: Sequence[tuple[re.Pattern[str], Callable[..., float | None]]] = (
    (re.compile(r"(final|best|last(\d+))"), _accuracy),
    (re.compile("(seconds|seconds_per_round|kappa)"), _time),
    (ROUNDS_TO, _rounds_to),
    (re.compile(r"(?:mean|first(\d+)):(\w+)"), _mean),
    (re.compile(r"recorded:([\w/]+):(\d+)"), _recorded),
    (re.compile("n_over_e"), _n_over_e),
    (re.compile("neuron_drift"), _neuron_drift),
)
