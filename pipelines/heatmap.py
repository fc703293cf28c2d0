"""The heat map of a partition: client x class, as FNR-FL's Fig. 2."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np

from plugins.data.types import Ints

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize

NUMBERED = (40, 20)  # most clients and classes for which the cells carry their numbers
NAMED = 30  # most classes whose names fit


def heatmap(counts: Ints, classes: tuple[str, ...], title: str) -> bytes:
    """`counts` [N, C] as a PNG: a row per client, a column per class, the darker the more samples, white for none.

    Beside it a bar per client for all its samples. Small grids carry the numbers.
    """
    # Imported here, since it takes a second that a refused partition doesn't need.
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    n, c = counts.shape
    numbered = n <= NUMBERED[0] and c <= NUMBERED[1]
    digits = len(str(counts.max()))
    width = (max(0.42, 0.1 * digits) if numbered else 0.34) * min(c, NAMED)
    height = min(0.27 * n, 8.0)
    figure = Figure(figsize=(max(3.6, width) + 2.6, max(2.2, height) + 1.3), layout="constrained")
    cells, bars = figure.subplots(1, 2, sharey=True, width_ratios=[max(3.6, width), 1.2])

    # The square root, so that a few samples beside thousands don't look like none.
    norm = mpl.colors.PowerNorm(0.5, vmin=0, vmax=counts.max())
    colours = mpl.colors.ListedColormap(mpl.colormaps["Blues"](np.linspace(0.08, 1, 256)))
    image = cells.imshow(
        np.where(counts > 0, counts, np.nan), aspect="auto", cmap=colours, norm=norm, interpolation="nearest"
    )
    if numbered:
        _numbers(cells, counts, norm, colours)
    if c <= NAMED:
        short = max(map(len, classes)) * c <= 8 * width
        slanted = {} if short else {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
        cells.set_xticks(range(c), classes, size=8, **slanted)
    if n <= NUMBERED[0]:
        cells.set_yticks(range(n), [str(k) for k in range(n)], size=8)
        # Lines between the cells, also between empty ones.
        cells.set_yticks(np.arange(n - 1) + 0.5, minor=True)
        cells.set_xticks(np.arange(c - 1) + 0.5, minor=True)
        cells.grid(which="minor", color="0.9", linewidth=0.5)
    cells.tick_params(which="both", length=0)
    cells.set(xlabel="class", ylabel="client")
    cells.set_title(title, loc="left", fontsize=10)

    sizes, colour = counts.sum(1), colours(0.6)
    if n <= NUMBERED[0]:
        bars.bar_label(bars.barh(range(n), sizes, color=colour), size=7, padding=2)
        bars.set_xlim(0, 1.5 * sizes.max())
    else:
        bars.stairs(sizes, np.arange(n + 1) - 0.5, orientation="horizontal", fill=True, color=colour)
    bars.set_xlabel("all classes", size=8)
    bars.tick_params(axis="y", which="both", length=0, labelleft=False)
    bars.tick_params(axis="x", labelsize=7)
    bars.xaxis.set_major_locator(MaxNLocator(2, integer=True))
    bars.spines[["top", "right"]].set_visible(False)
    bar = figure.colorbar(image, ax=bars, aspect=30)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    bar.set_label("training samples", size=9)
    picture = io.BytesIO()
    # No date inside: the same partition gives the same bytes.
    figure.savefig(picture, format="png", dpi=150, metadata={"Software": None})
    return picture.getvalue()


def _numbers(cells: Axes, counts: Ints, norm: Normalize, colours: Colormap) -> None:
    """The number of samples in each cell that has some, white on dark."""
    for k, label in np.argwhere(counts > 0):
        dark = np.dot(colours(norm(counts[k, label]))[:3], (0.299, 0.587, 0.114)) < 0.6
        cells.text(label, k, counts[k, label], ha="center", va="center", size=7, color="white" if dark else "0.1")
