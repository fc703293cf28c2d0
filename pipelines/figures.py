"""Pictures of the report, drawn with matplotlib into PNG bytes. Lines are named on the right, best on top."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pipelines.results import Result
from pipelines.summary import Scenario

Values = npt.NDArray[np.float64]
MIB = 2**20
BASELINE_COLOUR = "#000000"
# Okabe and Ito's palette without its yellow (too pale on white), then colours of Paul Tol's "muted" set.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#332288", "#999933", "#44AA99")
DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = (
    "solid",
    (0, (5, 1.5)),
    (0, (1.5, 1.2)),
    (0, (6, 1.5, 1.5, 1.5)),
)
LABEL = 0.24  # inches from one line's name to the next


@dataclass(frozen=True)
class Curve:
    """Accuracy in percent of one recipe over rounds, mean and spread over seeds."""

    recipe: str
    label: str
    rounds: Values  # [t]
    mean: Values  # [t]
    std: Values | None  # [t], None with one seed
    traffic: Values  # [t] MiB transferred up to and with the round, mean over seeds


def accuracy(scenario: Scenario, recipes: Sequence[str]) -> bytes:
    """Test accuracy per round, mean line and a band of one standard deviation over seeds: all rounds above, the second
    half of them enlarged below, where each line is named at its end."""
    curves = _curves(scenario)
    figure, (whole, late) = _canvas(len(curves), panels=2)
    for axes in (whole, late):
        for curve in curves:
            look = _look(curve.recipe, recipes, scenario)
            axes.plot(curve.rounds, curve.mean, **look)
            if curve.std is not None:
                lower, upper = curve.mean - curve.std, curve.mean + curve.std
                axes.fill_between(curve.rounds, lower, upper, color=look["color"], alpha=0.13, linewidth=0)
        axes.margins(x=0)
    whole.set_title(scenario.name, loc="left", fontsize=12)
    last = max(float(curve.rounds[-1]) for curve in curves)
    late.set_xlim(min(last / 2, last - 1), last)
    late.set_ylim(*_limits(curves, 0.5))
    late.set_xlabel("round (second half, enlarged)" if last > 2 else "round")
    whole.xaxis.set_major_locator(MaxNLocator(integer=True))
    late.xaxis.set_major_locator(MaxNLocator(integer=True))
    low, high = late.get_ylim()
    ends = [float((curve.mean[-1] - low) / (high - low)) for curve in curves]
    heights = _spread_out(ends, _gap(len(curves)))
    for curve, end, height in zip(curves, ends, heights, strict=True):
        _name_line(late, curve, _look(curve.recipe, recipes, scenario), [(1, end), (1.05, height), (1.13, height)])
    return _png(figure)


def traffic(scenario: Scenario, recipes: Sequence[str]) -> bytes:
    """Test accuracy against the data transferred so far, from the height that is reached in a quarter of the rounds."""
    curves = [curve for curve in _curves(scenario) if np.isfinite(curve.traffic).all()]
    figure, (axes,) = _canvas(len(curves), panels=1)
    axes.set_title(scenario.name, loc="left", fontsize=12)
    axes.set_xlabel("MiB transferred so far, all clients, up and down")
    if not curves:
        return _png(figure)
    for curve in curves:
        look = _look(curve.recipe, recipes, scenario)
        axes.plot(curve.traffic, curve.mean, **look)
        axes.plot(curve.traffic[-1], curve.mean[-1], "o", color=look["color"], markersize=5)
    axes.set_xlim(left=0)
    axes.set_ylim(*_limits(curves, 0.25))
    heights = _spread_out([1.0] * len(curves), _gap(len(curves)))
    for curve, height in zip(curves, heights, strict=True):
        _name_line(axes, curve, _look(curve.recipe, recipes, scenario), [(1.04, height), (1.13, height)])
    return _png(figure)


def accuracy_of_run(result: Result) -> bytes:
    """Test accuracy per round of one train item."""
    figure, (axes,) = _canvas(1, panels=1, dpi=100)
    points = [(row["round"], 100 * row["test_accuracy"]) for row in result.rows if math.isfinite(row["test_accuracy"])]
    axes.plot([x for x, _ in points], [y for _, y in points], color=COLOURS[0], linewidth=2)
    axes.set_xlabel("round")
    axes.set_title(result.key, loc="left", fontsize=12)
    return _png(figure)


def _curves(scenario: Scenario) -> list[Curve]:
    """One curve per line of the scenario, by its height at the end, over the rounds that all of its seeds evaluated."""
    curves = []
    for line in scenario.lines:
        runs = [r for r in scenario.results if r.recipe == line.recipe]
        tables = [{int(row["round"]): row for row in r.rows if math.isfinite(row["test_accuracy"])} for r in runs]
        rounds = sorted(set.intersection(*(set(table) for table in tables)))
        values = 100 * np.array([[table[t]["test_accuracy"] for t in rounds] for table in tables])  # [seeds, t]
        bytes_so_far = [dict(zip((int(row["round"]) for row in r.rows), _so_far(r), strict=True)) for r in runs]
        curves.append(
            Curve(
                recipe=line.recipe,
                label=line.label,
                rounds=np.array(rounds, dtype=float),
                mean=values.mean(0),
                std=values.std(0, ddof=1) if len(runs) > 1 else None,
                traffic=np.array([[so_far[t] for t in rounds] for so_far in bytes_so_far]).mean(0) / MIB,
            )
        )
    # Not in the table's order: what is not compared stands last there, wherever it ends.
    return sorted((curve for curve in curves if len(curve.rounds)), key=lambda curve: -curve.mean[-1])


def _so_far(result: Result) -> list[float]:
    return [float(x) for x in np.cumsum([row["bytes_up"] + row["bytes_down"] for row in result.rows])]


def _look(recipe: str, recipes: Sequence[str], scenario: Scenario) -> dict[str, Any]:
    """Colour and dashes of a recipe: the same in every picture, and different even for eyes that see no colour."""
    if scenario.baseline is not None and recipe == scenario.baseline.recipe:
        return {"color": BASELINE_COLOUR, "linestyle": "solid", "linewidth": 2.4}
    place = list(recipes).index(recipe)
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": DASHES[place % len(DASHES)], "linewidth": 1.8}


def _canvas(lines: int, panels: int, dpi: int = 200) -> tuple[Figure, list[Axes]]:
    """Panels on top of each other; few inches wide, so that the letters stay readable when a phone shrinks them."""
    height = _panel(lines)
    figure = Figure(figsize=(6.4, height if panels == 1 else 2.7 + height), dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots(panels, 1, squeeze=False, height_ratios=[2.7, height][-panels:])[:, 0]
    for axes in panel:
        axes.set_ylabel("test accuracy, %", fontsize=12)
        axes.grid(color="#e4e4e4", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=11)
        axes.xaxis.label.set_size(12)
        axes.set_axisbelow(True)
    return figure, list(panel)


def _gap(lines: int) -> float:
    """Distance of the names of lines as a share of the lowest panel (the lettering below it takes about 0.7 inches)."""
    return LABEL / (_panel(lines) - 0.7)


def _panel(lines: int) -> float:
    """Height in inches of the lowest panel with its lettering: room for the names of all lines."""
    return max(3.4, LABEL * lines + 0.9)


def _limits(curves: Sequence[Curve], share: float) -> tuple[float, float]:
    """Range of accuracy, with a margin, that holds the curves from `share` of their rounds on."""
    late = [curve.mean[math.floor(share * (len(curve.mean) - 1)) :] for curve in curves]
    low, high = min(float(part.min()) for part in late), max(float(curve.mean.max()) for curve in curves)
    margin = max(0.06 * (high - low), 0.5)
    return low - margin, min(high + margin, 100.5)


def _name_line(axes: Axes, curve: Curve, look: dict[str, Any], path: Sequence[tuple[float, float]]) -> None:
    """Writes a line's name and last value at the end of a sample of the line along `path` (shares of the panel)."""
    x, y = zip(*path, strict=True)
    axes.plot(x, y, transform=axes.transAxes, clip_on=False, **(look | {"linewidth": 1.4}))
    weight = "bold" if look["color"] == BASELINE_COLOUR else "normal"
    name = f"{curve.label} {curve.mean[-1]:.1f}"
    axes.text(x[-1] + 0.015, y[-1], name, transform=axes.transAxes, va="center", fontsize=11, fontweight=weight)


def _spread_out(heights: Sequence[float], gap: float) -> list[float]:
    """Heights in descending order, moved as little as makes neighbours `gap` apart and keeps them within 0..1."""
    groups: list[list[float]] = []  # each is a run of labels that touch, given by the heights they want
    for height in heights:
        groups.append([height])
        while len(groups) > 1 and _edge(groups[-2], gap, -1) - _edge(groups[-1], gap, +1) < gap:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [_edge(group, gap, +1) - i * gap for group in groups for i in range(len(group))]


def _edge(group: Sequence[float], gap: float, side: int) -> float:
    """Height of the highest (side +1) or lowest (-1) label of a run that is centred on what its labels want."""
    half = (len(group) - 1) * gap / 2
    return min(max(sum(group) / len(group), half), max(1 - half, half)) + side * half


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # Without the version stamp the same numbers give the same bytes.
    figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()
