"""Compares runs by the virtual clock: all are read at the same times.

The first of many noisy tests above a goal comes early, and some methods are tested ten times as
often as others. So every run is read on one grid, and reaches a goal when the mean of LAST readings
is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from fedml_noniid.metrics import Metric
from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.reporting.comparison import interval
from fedml_noniid.pipelines.reporting.figures import NAMES, look, style
from fedml_noniid.pipelines.reporting.heatmap import as_png
from fedml_noniid.pipelines.reporting.summary import spread
from fedml_noniid.pipelines.reporting.text import NONE, plus_minus

POINTS = 48  # of the grid
LAST = 3  # readings
PART = 0.95  # of what the first line has at the end of the grid: the goal
NOTE = (
    f"Every run is read at the same {POINTS} times, until the first of them is over: the newest "
    "model that was tested, means over seeds. The goal is {goal}, {part:.0f} % of what the first "
    f"line has at the end. A run reaches it when the mean of {LAST} readings is there. Times as "
    "fast: the first line's seconds to the goal divided by these, the geometric mean over seeds, "
    "with its 95 % interval; the seeds have the same devices."
)
Curves = dict[tuple[str, str], pd.DataFrame]  # by scenario and recipe: a column for each seed


def read(runs: Iterable[ItemResult]) -> Curves:
    """The main metric of the runs with a clock on one grid of virtual seconds, first in the order
    of `runs`. Empty without such runs, or for a metric that has no upper limit."""
    courses: dict[tuple[str, str], dict[int, pd.Series[float]]] = {}
    ends = []
    for run in runs:
        tested = [row for row in run.rows if math.isfinite(row[f"test_{run.main}"])]
        if tested and "clock_s" in tested[0] and run.metric.most < math.inf:
            course = pd.DataFrame(tested).set_index("clock_s")[f"test_{run.main}"]
            newest = course[~course.index.duplicated(keep="last")]
            courses.setdefault((run.scenario, run.recipe), {})[run.seed] = newest
            ends.append(run.params.get("train.until_s") or run.rows[-1]["clock_s"])
    if not courses:
        return {}
    end = min(float(str(last)) for last in ends)
    grid = np.linspace(end / POINTS, end, POINTS)
    return {
        key: pd.DataFrame({k: course.reindex(grid, method="ffill") for k, course in seeds.items()})
        for key, seeds in courses.items()
    }


def goal_of(curves: Curves) -> float:
    """What the runs have to reach."""
    return PART * float(next(iter(curves.values())).iloc[-1].mean())


def seconds_to(goal: float, curves: pd.DataFrame) -> dict[int, float]:
    """Seed -> virtual seconds until the goal, of the seeds that reach it."""
    hits = curves.rolling(LAST).mean() >= goal
    return {int(seed): float(hits[seed].idxmax()) for seed in curves if hits[seed].any()}


def table(curves: Curves, metric: Metric) -> list[list[str]]:
    """A line for each scenario and recipe, the header first; accuracies in %."""
    if not curves:
        return []
    goal, first = goal_of(curves), next(iter(curves.values()))
    quarters = [first.index[POINTS * part // 4 - 1] for part in (1, 2, 3, 4)]
    header = ["scenario", "method", *(f"at {at:.3g} s{metric.unit}" for at in quarters)]
    base, rows = seconds_to(goal, first), []
    for (scenario, recipe), frame in curves.items():
        seconds, n = seconds_to(goal, frame), len(frame.columns)
        cells = [f"{len(seconds)} of {n} reach it", NONE]
        if len(seconds) == n:
            cells = [plus_minus(spread(seconds.values()), 1), _ratio(base, seconds)]
        means = frame.mean(axis=1, skipna=False)[quarters]
        shown = (NONE if mean != mean else metric.number(mean) for mean in means)
        rows.append([scenario, recipe, *shown, *cells])
    return [[*header, f"s to {metric.shown(goal)}", "times as fast"], *rows]


def _ratio(base: dict[int, float], seconds: dict[int, float]) -> str:
    """`1.80 (1.34 to 2.41)`; `-` if a seed has no time of the first line."""
    if not base or base.keys() != seconds.keys():
        return NONE
    ratios = spread(math.log(base[seed] / seconds[seed]) for seed in seconds)
    assert ratios is not None, "there is a seed"
    ends = interval(ratios)
    limits = "" if ends is None else " ({:.2f} to {:.2f})".format(*map(math.exp, ends))
    return f"{math.exp(ratios.mean):.2f}{limits}"


def note(curves: Curves, metric: Metric) -> str:
    """What the table says."""
    return NOTE.format(goal=metric.shown(goal_of(curves)), part=100 * PART)


def picture(curves: Curves, metric: Metric) -> bytes:
    """The mean over seeds against virtual seconds, a line each."""
    figure = Figure(figsize=(6.4, 4.2), dpi=200, layout="constrained")
    axes = figure.subplots()
    style(axes)
    for index, ((scenario, recipe), frame) in enumerate(curves.items()):
        mean = metric.factor * frame.mean(axis=1, skipna=False)
        axes.plot(
            frame.index, mean, label=f"{scenario}, {recipe}", **look(index, not index, (1.8, 2.4))
        )
    axes.set_xlabel("virtual seconds", fontsize=12)
    axes.set_ylabel(f"test {metric.label}{metric.unit}", fontsize=12)
    axes.legend(**NAMES | {"loc": "upper center", "bbox_to_anchor": (0.5, -0.14), "ncols": 2})
    return as_png(figure)
