"""What the pictures of the papers share: panels side by side, a colour per method, bands over
seeds, PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from fedml_noniid.pipelines.reporting.figures import Values, style

Name = TypeVar("Name", str, float)
WIDTH, HEIGHT = 4.2, 3.2  # inches of a panel


def panels(
    titles: Sequence[str],
    across: int = 4,
    x: str = "",
    y: str = "",
    size: tuple[float, float] | None = None,
) -> tuple[Figure, list[Axes]]:
    """A figure with a panel per title, at most `across` in a row.

    All panels get label `x`, the left ones `y`.

    `size`: width and height of the figure in inches. The default follows from the panels.
    """
    across = min(len(titles), across)
    down = -(-len(titles) // across)
    figure = Figure(figsize=size or (WIDTH * across, HEIGHT * down), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = list(figure.subplots(down, across, squeeze=False).flatten())
    for axes in grid[len(titles) :]:
        axes.set_visible(False)
    for index, (axes, title) in enumerate(zip(grid, titles, strict=False)):
        style(axes)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel(x)
        axes.set_ylabel("" if index % across else y)
    return figure, grid[: len(titles)]


def line(axes: Axes, x: Sequence[float], values: Values, label: str, look: dict[str, Any]) -> None:
    """Draws the mean of `values` [seeds, points].

    With several seeds, a band shows one standard deviation.
    """
    mean = values.mean(0)
    axes.plot(x, mean, label=label, marker="." if len(x) < 8 else "", **look)
    if len(values) > 1:
        std = np.asarray(values.std(0, ddof=1))
        axes.fill_between(x, mean - std, mean + std, color=look["color"], alpha=0.13, linewidth=0)


def bars(
    axes: Axes,
    groups: Sequence[str],
    heights: Mapping[str, Sequence[float]],
    colours: Sequence[str],
    errors: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Draws one bar per name and group, none for NaN, with its deviation where `errors` has one."""
    width = 0.8 / len(heights)
    for index, (name, values) in enumerate(heights.items()):
        axes.bar(
            np.arange(len(groups)) + (index - (len(heights) - 1) / 2) * width,
            values,
            0.95 * width,
            yerr=errors and errors[name],
            color=colours[index],
            label=name,
            capsize=3,
            ecolor="grey",  # seen on black bars too
        )
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(visible=False, axis="x")


def legend(figure: Figure, axes: Axes, together: int = 1) -> None:
    """One legend below all panels, as wide as fits. `together` successive lines share a column."""
    handles, labels = axes.get_legend_handles_labels()
    wide = 0.75 + 0.08 * max(
        map(len, labels), default=0
    )  # inches of a column: handle, spaces, letters
    most = max(1, min(len(labels), 6, int(figure.get_figwidth() / wide)))
    even = (n for n in range(most, 1, -1) if len(labels) % (n * together) == 0)
    across = next(even, most) if together > 1 else most
    figure.legend(
        handles, labels, loc="outside lower center", ncols=across, frameon=False, fontsize=9
    )


def png(figure: Figure, together: int = 1) -> bytes:
    """The picture with the legend of its fullest panel. 256 colours need only a third of the bytes.

    The same numbers give the same bytes.
    """
    fullest = max(figure.axes, key=lambda axes: len(axes.get_legend_handles_labels()[1]))
    if fullest.get_legend_handles_labels()[1]:
        legend(figure, fullest, together)
    drawn, picture = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    # The four channels are opaque; PIL quantises three.
    Image.open(drawn).convert("RGB").quantize(256).save(picture, "PNG", optimize=True)
    return picture.getvalue()


def extremes(values: Mapping[Name, float]) -> tuple[Name, Name]:
    """The names of the highest and of the lowest value."""
    return max(values, key=lambda name: values[name]), min(values, key=lambda name: values[name])
