"""Pictures of the report, drawn with matplotlib into PNG bytes.

The lines' names stand on the right, the highest end on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fedml_noniid.metrics import METRICS, Metric
from fedml_noniid.pipelines.reporting.heatmap import as_png
from fedml_noniid.pipelines.reporting.summary import ScenarioSummary, courses

Values = npt.NDArray[np.float64]
BASELINE_COLOUR = "#000000"
# Okabe and Ito's palette without yellow, which is too pale on white, then colours of Paul Tol's
# "muted" set.
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#882255",
    "#332288",
    "#999933",
    "#44AA99",
)
DASHES = ("solid", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
LABEL = 0.24  # inches from one line's name to the next
# The legend beside a panel.
NAMES: dict[str, Any] = {
    "loc": "upper left",
    "bbox_to_anchor": (1.01, 1.0),
    "frameon": False,
    "fontsize": 11,
    "borderaxespad": 0.0,
    "handlelength": 2.2,
    "labelspacing": 0.35,
}
NO_RESULT = "no result"
MAX_MARKS = 4000  # clients of a row that have a mark


@dataclass(frozen=True)
class Curve:
    """Accuracy in percent, or another metric, of one recipe over rounds: mean and spread over
    seeds."""

    recipe: str
    label: str
    rounds: Values  # [t]
    mean: Values  # [t]
    std: Values | None  # [t], None with one seed


def accuracy(scenario: ScenarioSummary, recipes: Sequence[str]) -> bytes:
    """Test accuracy, or another main metric, per round: a line for the mean over seeds, and a band
    of one standard deviation.

    The upper panel has all rounds. The lower one enlarges the second half of them, and names the
    lines in the order of their ends.
    """
    curves, metric = _curves(scenario), scenario.metric
    # Room for the names of all lines. Narrow enough that a phone shows the letters large enough.
    height = max(3.4, LABEL * len(curves) + 0.9)
    figure = _figure(2.7 + height)
    whole, late = figure.subplots(2, 1, height_ratios=[2.7, height])
    for axes in (whole, late):
        draw_curves(axes, scenario, recipes)
        axes.tick_params(labelsize=11)
        axes.set_ylabel(axes.get_ylabel(), fontsize=12)
        axes.xaxis.label.set_size(12)
    whole.set_xlabel("")
    whole.set_title(scenario.name, loc="left", fontsize=12)
    end = max(float(curve.rounds[-1]) for curve in curves)
    late.set_xlim(min(end / 2, end - 1), end)
    late.set_ylim(*_limits(curves, metric))
    if end > 2:
        late.set_xlabel("round (second half, enlarged)")
    late.legend(**NAMES)
    return as_png(figure)


def draw_curves(axes: Axes, scenario: ScenarioSummary, recipes: Sequence[str]) -> None:
    """A line for each method of the scenario. `recipes`: of all scenarios, for the colours."""
    looks, metric = _looks(scenario, recipes), scenario.metric
    style(axes)
    axes.set(xlabel="round", ylabel=f"test {metric.label}{metric.unit}")
    for curve in _curves(scenario):
        name = f"{curve.label} {curve.mean[-1]:.{metric.decimals - 1}f}"
        axes.plot(curve.rounds, curve.mean, label=name, **looks[curve.recipe])
        if curve.std is not None:
            lower, upper = curve.mean - curve.std, curve.mean + curve.std
            colour = looks[curve.recipe]["color"]
            axes.fill_between(curve.rounds, lower, upper, color=colour, alpha=0.13, linewidth=0)
    axes.margins(x=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def clients(scenario: ScenarioSummary, recipes: Sequence[str]) -> bytes | None:
    """Accuracy of the clients, methods in the table's order: a mark each, all seeds together.

    None without any.
    """
    looks = _looks(scenario, recipes)
    rows = [
        (method.label, looks[method.recipe]["color"], _client_scores(scenario, method.recipe))
        for method in scenario.methods
    ]
    rows = [row for row in rows if len(row[2])]
    if not rows:
        return None
    figure = _figure(0.34 * len(rows) + 0.9)
    axes = figure.subplots()
    draw_clients(axes, rows, scenario.metric)
    axes.set_title(scenario.name, loc="left", fontsize=12)
    return as_png(figure)


def draw_all_clients(axes: Axes, scenario: ScenarioSummary, recipes: Sequence[str]) -> None:
    """As `draw_clients`: a row for each of `recipes`, also for those without values."""
    looks = _looks(scenario, recipes)
    rows = [(name, looks[name]["color"], _client_scores(scenario, name)) for name in recipes]
    draw_clients(axes, rows, scenario.metric)


def _client_scores(scenario: ScenarioSummary, recipe: str) -> Values:
    """The scores of a recipe's clients as shown, of all seeds."""
    runs = [run for run in scenario.results if run.recipe == recipe]
    scores = [score for run in runs for score in run.client_scores]
    return np.array([scenario.metric.factor * score for score in scores], dtype=float)


def _figure(height: float) -> Figure:
    figure = Figure(figsize=(6.4, height), dpi=200, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def draw_clients(
    axes: Axes, rows: Sequence[tuple[str, str, Values]], metric: Metric = METRICS["accuracy"]
) -> None:
    """Rows of clients' accuracies in percent, or of another metric, the first on top: a mark each,
    and a box for the middle half.

    A row is its name, its colour and the accuracies [n], which may be none.
    """
    style(axes)
    for position, (_, colour, values) in enumerate(rows):
        if not len(values):
            axes.text(
                0.5,
                position,
                NO_RESULT,
                transform=axes.get_yaxis_transform(),
                ha="center",
                va="center",
                color="0.4",
            )
            continue
        lines = {"color": colour, "linewidth": 1.2}
        # Of very many, marks evenly spaced in their order: the lowest and the highest are there.
        ranks = np.linspace(0, len(values) - 1, min(len(values), MAX_MARKS)).astype(np.int64)
        marks = values if len(ranks) == len(values) else np.sort(values)[ranks]
        axes.plot(marks, np.full(len(marks), position), "|", color=colour, alpha=0.35, markersize=9)
        axes.boxplot(
            [values],
            positions=[position],
            orientation="horizontal",
            widths=0.62,
            whis=(0, 100),
            manage_ticks=False,
            boxprops=lines,
            whiskerprops=lines,
            capprops=lines,
            medianprops=lines | {"linewidth": 2.4},
        )
    axes.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel(f"{metric.label} of a client{metric.unit}", fontsize=12)
    axes.tick_params(labelsize=11)


def _curves(scenario: ScenarioSummary) -> list[Curve]:
    """A curve per method of the scenario, over the rounds that all its seeds evaluated; the highest
    end comes first."""
    curves = []
    for method in scenario.methods:
        frame = courses(run for run in scenario.results if run.recipe == method.recipe)
        both = frame[np.isfinite(frame).all(axis=1)]
        values = scenario.metric.factor * both.to_numpy().T  # [seeds, t]
        std = values.std(0, ddof=1) if len(values) > 1 else None
        rounds = both.index.to_numpy(dtype=float)
        curves.append(Curve(method.recipe, method.label, rounds, values.mean(0), std))
    # The table's order is another one: methods that are not compared stand last there.
    return sorted(
        (curve for curve in curves if len(curve.rounds)), key=lambda curve: -curve.mean[-1]
    )


def look(
    index: int, is_baseline: bool = False, widths: tuple[float, float] = (1.6, 2.0)
) -> dict[str, Any]:
    """Colour and dashes of the `place`-th method, also for eyes that see no colour; black for the
    baseline.

    `widths`: of its line, and of the baseline's.
    """
    if is_baseline:
        return {"color": BASELINE_COLOUR, "linestyle": "solid", "linewidth": widths[1]}
    return {
        "color": COLOURS[index % len(COLOURS)],
        "linestyle": DASHES[index % len(DASHES)],
        "linewidth": widths[0],
    }


def style(axes: Axes) -> None:
    """A pale grid behind the lines, and no frame above and on the right."""
    axes.grid(color="#e4e4e4", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def _looks(scenario: ScenarioSummary, recipes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The look of each recipe, the same in every picture."""
    base = scenario.baseline and scenario.baseline.recipe
    return {recipe: look(index, recipe == base, (1.8, 2.4)) for index, recipe in enumerate(recipes)}


def _limits(curves: Sequence[Curve], metric: Metric) -> tuple[float, float]:
    """Range of accuracy, with a margin, that holds the second half of the curves."""
    late = [curve.mean[(len(curve.mean) - 1) // 2 :] for curve in curves]
    low, high = (
        min(float(part.min()) for part in late),
        max(float(curve.mean.max()) for curve in curves),
    )
    least = 0.5 if metric.percent else 0.005
    margin = max(0.06 * (high - low), least)
    return low - margin, min(high + margin, metric.factor + least)
