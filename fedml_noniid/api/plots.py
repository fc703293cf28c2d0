"""Pictures of results in matplotlib's axes, with the looks of the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from fedml_noniid.core.errors import UserError, shown
from fedml_noniid.metrics import metric_of
from fedml_noniid.pipelines.reporting import figures
from fedml_noniid.pipelines.reporting.summary import BASELINE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ACCURACY = (6.0, 3.8)  # inches
COLUMNS = 2  # panels side by side


def axes_for(
    n: int, ax: Axes | None, size: tuple[float, float], share_x: bool = False
) -> list[Axes]:
    """`n` panels of a size in inches: `ax`, or those of a new figure of pyplot.

    UserError if `ax` is of another type, or one of several.
    """
    if not n:
        raise UserError("plot: there are no results")
    from matplotlib import axes, pyplot

    if ax is not None:
        if not isinstance(ax, axes.Axes):
            raise UserError(
                f"plot: ax = {shown(ax)} is refused; allowed: one Axes of matplotlib, or none"
            )
        if n != 1:
            raise UserError(
                f"plot: ax is one panel, but there are {n} settings; leave ax out, or choose "
                "one setting"
            )
        return [ax]
    columns = min(n, COLUMNS)
    rows = math.ceil(n / columns)
    inches = size[0] * columns, size[1] * rows
    grid = pyplot.subplots(
        rows,
        columns,
        figsize=inches,
        squeeze=False,
        sharex=share_x,
        sharey=True,
        layout="constrained",
    )[1].ravel()
    for index in range(n, len(grid)):
        grid[index].set_axis_off()
        grid[index - columns].tick_params(labelbottom=True)  # the last panel of its column
    return list(grid[:n])


def accuracy(
    axes: Axes, rounds: Mapping[str, pd.DataFrame], recipes: Sequence[str], main: str = "accuracy"
) -> None:
    """Test accuracy in percent, or another `main` metric.

    `rounds`: by recipe. `recipes`: of all panels, for their colours.
    """
    from matplotlib.ticker import MaxNLocator

    drawn, metric, column = [], metric_of(main), f"test_{main}"
    for recipe, frame in rounds.items():
        look = figures.look(recipes.index(recipe), recipe == BASELINE)
        measured = frame.dropna(subset=column)
        table = metric.factor * measured.pivot(index="round", columns="seed", values=column)
        if len(table.columns) > 1:
            axes.plot(table.index, table, color=look["color"], linewidth=0.6, alpha=0.35)
        mean = table.dropna().mean(axis=1)
        (line,) = axes.plot(
            mean.index, mean, label=f"{recipe} {figures.last(mean.iloc[-1], metric)}", **look
        )
        drawn.append((mean.iloc[-1], line))
    figures.style(axes)
    axes.set(xlabel="round", ylabel=f"test {metric.label}{metric.unit}")
    if not drawn:
        axes.set_xticks([])
        axes.text(0.5, 0.5, figures.NO_RESULT, transform=axes.transAxes, ha="center", color="0.4")
        return
    axes.margins(x=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    best_first = [line for _, line in sorted(drawn, key=lambda pair: -pair[0])]
    axes.legend(
        handles=best_first,
        loc="center left",
        bbox_to_anchor=(1.01, 0.5),
        frameon=False,
        handlelength=2.6,
    )


def height_of_clients(recipes: int) -> float:
    """Inches of a panel of `clients`."""
    return 0.34 * recipes + 1.0


def clients(
    axes: Axes,
    values: Mapping[str, Sequence[float]],
    recipes: Sequence[str],
    main: str = "accuracy",
) -> None:
    """Accuracy of clients in percent, or another `main` metric: a mark each, a box for the middle
    half.

    `values`: by recipe. `recipes`: of all panels, the first on top; those without values have a row
    too.
    """
    rows = [
        (
            recipe,
            figures.look(index, recipe == BASELINE)["color"],
            metric_of(main).factor * np.asarray(values.get(recipe, ()), np.float64),
        )
        for index, recipe in enumerate(recipes)
    ]
    figures.draw_clients(axes, rows, metric_of(main))
