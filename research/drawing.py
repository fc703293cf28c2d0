"""The picture of a table: its own numbers, mean and spread over seeds, in panels.

A cell of which a seed diverged, or whose runs have seen the test set, is in the table only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import pandas as pd
from matplotlib.axes import Axes
from pydantic import Field

from fedml_noniid.core.options import Section
from fedml_noniid.pipelines.reporting.figures import BASELINE_COLOUR, COLOURS, look
from research.papers.pictures import bars, panels, png

if TYPE_CHECKING:
    from research.table import Place, Table

BASELINE = "FedAvg"
RED = "#d62728"
MARKERS = "oxs^v"  # two that lie on one another are seen both


class Panel(Section):
    """One panel.

    The x of a number is the title of its cell, without the panel's title. With `key`, the end of
    the name of a parameter, it is that of its run, so that smaller sizes show what they ran.
    """

    columns: list[str] = Field(default_factory=list)  # of the table; all of them by default
    x: str = ""  # labels of the axes
    y: str = ""
    key: str = ""
    log: bool = False  # whether the x axis is logarithmic
    level: str = ""  # a row of the table that is drawn as one level line


class Picture(Section):
    """How a table is drawn.

    `barh` draws gains, `clients` the accuracy of each client on the first seed, with a red circle
    for the worst.
    """

    kind: Literal["bars", "barh", "lines", "clients"]
    lines: Literal["rows", "columns"] = "rows"  # the axis that has a colour for each title
    panels: dict[str, Panel]


def draw(picture: Picture, table: Table) -> dict[str, bytes]:
    """The picture by its ending; nothing without numbers."""
    if all(cell.mean is None for cell in table.cells.values()):
        return {}
    size = (7.0, 3.8) if len(picture.panels) == 1 else None
    figure, grid = panels(list(picture.panels), 2, size=size)
    for axes, (title, panel) in zip(grid, picture.panels.items(), strict=True):
        columns = panel.columns or list(table.spec.columns)
        levels = [table.cells[panel.level, column].mean for column in columns if panel.level]
        for level in [mean for mean in levels if mean is not None][:1]:
            axes.axhline(level, color=BASELINE_COLOUR, label=panel.level)
        positions = [(r, c) for r in table.spec.rows for c in columns if r != panel.level]
        _plot(axes, picture.kind, _numbers(picture, table, title, positions))
        axes.set(xlabel=panel.x, ylabel=panel.y, **{"xscale": "log"} if panel.log else {})
    return {"png": png(figure)}


def _numbers(
    picture: Picture, table: Table, title: str, positions: Sequence[Place]
) -> pd.DataFrame:
    """What a panel shows: line, x, mean and std of each point, in the table's order.

    A line and an x without any number are left out.
    """
    key = picture.panels[title].key
    records: list[tuple[str, object, float, float]] = []
    for position in positions:
        line, x = position[:: 1 if picture.lines == "rows" else -1]
        cell, label = table.cells[position], x.removeprefix(f"{title}, ")
        value = cell.gain and cell.gain.spread if picture.kind == "barh" else cell.measured
        if cell.mean is None or value is None:
            records.append((line, label, math.nan, math.nan))
        elif picture.kind == "clients":
            folder = table.measured.folder(str(table.at[position]["study"])) / "evaluation"
            clients = pd.read_csv(folder / cell.group.runs[0].key / "per_client.csv")
            records += [
                (line, k, 100 * x, math.nan) for k, x in enumerate(clients["test_accuracy"], 1)
            ]
        else:
            params = cell.group.runs[0].params.items()
            at = next(value for name, value in params if name.endswith(key)) if key else label
            records.append((line, at, value.mean, value.std or math.nan))
    numbers = pd.DataFrame(records, columns=["line", "x", "mean", "std"])
    titles = table.spec.rows if picture.lines == "rows" else table.spec.columns
    numbers["line"] = pd.Categorical(numbers["line"], list(titles))
    for axis in ("x", "line"):
        numbers = numbers[numbers.groupby(axis, observed=True)["mean"].transform("count") > 0]
    return numbers.sort_values("x") if key else numbers


def _plot(axes: Axes, kind: str, numbers: pd.DataFrame) -> None:
    """Draws bars, gains from the top, or lines with bars of one deviation; of clients points."""
    lines = {str(line): points for line, points in numbers.groupby("line", observed=True)}
    looks = {  # a line has the same look in all panels
        line: look(index, line == BASELINE) | {"marker": MARKERS[index % len(MARKERS)]}
        for index, line in enumerate(numbers["line"].cat.categories)
    }
    if kind == "barh":
        axes.barh(numbers["x"], numbers["mean"], xerr=numbers["std"], color=COLOURS[0], capsize=3)
        axes.invert_yaxis()
        axes.axvline(0, color=RED)
    elif kind == "bars" and lines:
        heights, errors = (
            {line: points[part].tolist() for line, points in lines.items()}
            for part in ("mean", "std")
        )
        colours = [looks[line]["color"] for line in lines]
        bars(axes, numbers["x"].unique().tolist(), heights, colours, errors)
    else:
        for line, points in lines.items():
            style = looks[line] | ({"linestyle": "none"} if kind == "clients" else {})
            axes.errorbar("x", "mean", "std", data=points, label=line, capsize=3, **style)
    if kind == "clients":
        worst = numbers.loc[numbers.groupby("line", observed=True)["mean"].idxmin()]
        axes.scatter(worst["x"], worst["mean"], 90, "none", label="worst client", edgecolors=RED)
