"""What the pictures of the papers share: panels side by side, a colour per method, bands over seeds, PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from pipelines.figures import BASELINE_COLOUR, COLOURS, DASHES, Values

WIDTH, HEIGHT = 4.2, 3.2  # inches of a panel


def panels(n: int, columns: int = 4) -> tuple[Figure, list[Axes]]:
    """A figure with `n` panels in rows of at most `columns`."""
    across = min(n, columns)
    down = -(-n // across)
    figure = Figure(figsize=(WIDTH * across, HEIGHT * down), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(down, across, squeeze=False).flatten()
    for axes in grid[n:]:
        axes.set_visible(False)
    for axes in grid[:n]:
        axes.grid(color="#e4e4e4", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    return figure, list(grid[:n])


def look(place: int, baseline: bool = False) -> dict[str, object]:
    """Colour and dashes of the `place`-th method, also for eyes that see no colour; black for the baseline."""
    if baseline:
        return {"color": BASELINE_COLOUR, "linestyle": "solid", "linewidth": 2.0}
    return {"color": COLOURS[place % len(COLOURS)], "linestyle": DASHES[place % len(DASHES)], "linewidth": 1.6}


def line(axes: Axes, x: Sequence[float], values: Values, label: str, style: dict[str, object]) -> None:
    """The mean of `values` [seeds, points], and where there are more seeds than one a band of one deviation."""
    mean = values.mean(0)
    axes.plot(x, mean, label=label, marker="." if len(x) < 8 else "", **style)  # type: ignore[arg-type]  # matplotlib's types want each option by name
    if len(values) > 1:
        std = np.asarray(values.std(0, ddof=1))
        axes.fill_between(x, mean - std, mean + std, color=str(style["color"]), alpha=0.13, linewidth=0)


def legend(figure: Figure, axes: Axes, together: int = 1) -> None:
    """One legend for all panels, below them, as wide as fits; `together` lines in a row share a column."""
    handles, labels = axes.get_legend_handles_labels()
    wide = 0.75 + 0.08 * max(map(len, labels), default=0)  # inches of a column: handle, spaces, letters
    most = max(1, min(len(labels), 6, int(figure.get_figwidth() / wide)))
    even = (n for n in range(most, 1, -1) if len(labels) % (n * together) == 0)
    across = next(even, most) if together > 1 else most
    figure.legend(handles, labels, loc="outside lower center", ncols=across, frameon=False, fontsize=9)


def png(figure: Figure) -> bytes:
    """The picture in 256 colours, a third of the bytes; the same bytes for the same numbers."""
    drawn, picture = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png")
    # The four channels are opaque; PIL quantises three.
    Image.open(drawn).convert("RGB").quantize(256).save(picture, "PNG", optimize=True)
    return picture.getvalue()
