"""The heat map of a partition: client x class, as FNR-FL's Fig. 2."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedml_noniid.data.types import Floats, Ints
from fedml_noniid.pipelines.reporting.text import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

NUMBERED = (40, 20)  # most clients and classes for which the cells carry their numbers
NAMED = 30  # most classes whose names fit
CHARACTER = 0.07  # inches of one in a client's name
MAX_ROWS = 4000  # clients that are drawn; the picture has fewer pixels


def heatmap(counts: Ints, classes: Sequence[str], title: str, clients: Sequence[str] = ()) -> bytes:
    """`counts` [N, C] as a PNG: a row per client, a column per class, the darker the more samples,
    white for none. `clients`: their names, or numbers without.

    Of more than MAX_ROWS clients, that many are drawn, evenly spaced. Beside it a bar per client
    for all its samples. Small grids carry the numbers.
    """
    # Imported here, since it takes a second that a refused partition doesn't need.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    n = len(counts)
    width, height = panel_size(counts)
    is_named = bool(clients) and n <= NUMBERED[0]
    beside = 2.6 + (CHARACTER * max(map(len, _ticks(n, clients))) if is_named else 0)
    figure = Figure(figsize=(width + beside, height + 1.3), dpi=150, layout="constrained")
    cells, bars = figure.subplots(1, 2, sharey=True, width_ratios=[width, 1.2])
    image = draw(cells, counts, classes, title, clients)

    shown, colour = _shown(n), image.cmap(0.6)
    sizes = counts[shown].sum(1)
    if n <= NUMBERED[0]:
        bars.bar_label(bars.barh(range(n), sizes, color=colour), size=7, padding=2)
        bars.set_xlim(0, 1.5 * sizes.max())
    else:
        bars.stairs(
            sizes,
            np.linspace(-0.5, n - 0.5, len(shown) + 1),
            orientation="horizontal",
            fill=True,
            color=colour,
        )
    bars.set_xlabel("all classes", size=8)
    bars.tick_params(axis="y", which="both", length=0, labelleft=False)
    bars.tick_params(axis="x", labelsize=7)
    bars.xaxis.set_major_locator(MaxNLocator(2, integer=True))
    bars.spines[["top", "right"]].set_visible(False)
    bar = figure.colorbar(image, ax=bars, aspect=30)
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=8)
    bar.set_label("training samples", size=9)
    return as_png(figure)


def confusion(counts: Floats, classes: Sequence[str], title: str) -> bytes:
    """`counts` [C, C] as a PNG: a row per true class, a column per predicted class, in percent of
    the row. Small matrices carry the numbers."""
    from matplotlib.figure import Figure

    percent = np.rint(100 * counts / np.maximum(counts.sum(1, keepdims=True), 1)).astype(np.int64)
    width, height = panel_size(percent)
    beside = 0.6 + CHARACTER * max(map(len, _ticks(len(classes), classes)))  # inches of the names
    figure = Figure(figsize=(width + beside + 1.2, height + beside + 0.4), dpi=100)
    axes = figure.subplots()
    # A layout engine takes half as long as the drawing.
    left, bottom = beside / (width + beside + 1.2), beside / (height + beside + 0.4)
    figure.subplots_adjust(left=left, bottom=bottom, right=0.98, top=1 - 0.4 * bottom / beside)
    image = draw(axes, percent, classes, title, classes)
    axes.set(xlabel="predicted class", ylabel="true class")
    figure.colorbar(image, ax=axes).set_label("% of the true class", size=9)
    return as_png(figure)


def as_png(figure: Figure) -> bytes:
    """The picture as a file. `Figure.savefig` has the same bytes, but it draws everything twice."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    picture = io.BytesIO()
    # Without the version stamp the same numbers give the same bytes.
    canvas: Any = FigureCanvasAgg(figure)  # without types
    canvas.print_png(picture, metadata={"Software": None})
    return picture.getvalue()


def panel_size(counts: Ints) -> tuple[float, float]:
    """Width and height in inches of the grid of `counts` [N, C]."""
    n, c = counts.shape
    cell = max(0.42, 0.1 * len(str(counts.max()))) if _is_numbered(counts) else 0.34
    return max(3.6, cell * min(c, NAMED)), max(2.2, min(0.27 * n, 8.0))


def draw(
    axes: Axes, counts: Ints, classes: Sequence[str], title: str, clients: Sequence[str] = ()
) -> AxesImage:
    """The grid of `counts` [N, C] alone, into `axes`. `clients`: as in `heatmap`."""
    import matplotlib as mpl

    n, c = counts.shape
    # The square root, so that a few samples beside thousands don't look like none.
    norm = mpl.colors.PowerNorm(0.5, vmin=0, vmax=counts.max())
    colours = mpl.colors.ListedColormap(mpl.colormaps["Blues"](np.linspace(0.08, 1, 256)))
    shown = _shown(n)
    drawn = counts[shown]
    image = axes.imshow(
        np.where(drawn > 0, drawn, np.nan),
        aspect="auto",
        extent=(-0.5, c - 0.5, n - 0.5, -0.5),
        cmap=colours,
        norm=norm,
        interpolation="nearest",
    )
    if _is_numbered(counts):
        _numbers(axes, counts, norm, colours)
    if c <= NAMED:
        short = max(map(len, classes)) * c <= 8 * panel_size(counts)[0]
        slanted: dict[str, Any] = (
            {} if short else {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
        )
        axes.set_xticks(range(c), list(map(verbatim, classes)), size=8, **slanted)
    if n <= NUMBERED[0]:
        axes.set_yticks(range(n), [*map(verbatim, _ticks(n, clients))], size=8)
        # Lines between the cells, also between empty ones.
        axes.set_yticks(np.arange(n - 1) + 0.5, minor=True)
        axes.set_xticks(np.arange(c - 1) + 0.5, minor=True)
        axes.grid(which="minor", color="0.9", linewidth=0.5)
    axes.tick_params(which="both", length=0)
    every = "client" if len(shown) == n else f"client ({len(shown):,} of {n:,} are drawn)"
    axes.set(xlabel="class", ylabel=every)
    axes.set_title(verbatim(title), loc="left", fontsize=10)
    return image


def verbatim(name: str) -> str:
    """A name that matplotlib draws as it is: what stands between two dollars it takes for
    mathematics."""
    return name.replace("$", r"\$")


def _ticks(n_clients: int, clients: Sequence[str]) -> list[str]:
    """The clients' names, cut if they are long, or numbers."""
    if not clients:
        return [str(k) for k in range(n_clients)]
    return [*map(short, clients)]


def _shown(n_clients: int) -> Ints:
    """The clients that are drawn."""
    return np.linspace(0, n_clients - 1, min(n_clients, MAX_ROWS)).astype(np.int64)


def _is_numbered(counts: Ints) -> bool:
    return counts.shape[0] <= NUMBERED[0] and counts.shape[1] <= NUMBERED[1]


def _numbers(cells: Axes, counts: Ints, norm: Normalize, colours: Colormap) -> None:
    """The number of samples in each cell that has some, white on dark."""
    for k, label in np.argwhere(counts > 0):
        dark = np.dot(colours(norm(counts[k, label]))[:3], (0.299, 0.587, 0.114)) < 0.6
        cells.text(
            label,
            k,
            counts[k, label],
            ha="center",
            va="center",
            size=7,
            color="white" if dark else "0.1",
        )
