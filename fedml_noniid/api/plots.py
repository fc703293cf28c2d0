"""Panels of matplotlib for pictures of results, in which the report's code draws."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fedml_noniid.core.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = 2  # panels side by side


def panels(n: int, size: tuple[float, float], share_x: bool = False) -> list[Axes]:
    """`n` panels of a size in inches in a new figure of pyplot. UserError for none."""
    if not n:
        raise UserError("plot: there are no results")
    from matplotlib import pyplot

    columns = min(n, COLUMNS)
    rows = math.ceil(n / columns)
    grid = pyplot.subplots(
        rows,
        columns,
        figsize=(size[0] * columns, size[1] * rows),
        squeeze=False,
        sharex=share_x,
        sharey=True,
        layout="constrained",
    )[1].ravel()
    for index in range(n, len(grid)):
        grid[index].set_axis_off()
        grid[index - columns].tick_params(labelbottom=True)  # the last panel of its column
    return list(grid[:n])
