"""The heat map of a partition: client x class."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray


def heatmap(counts: NDArray[np.int64], classes: tuple[str, ...], title: str) -> bytes:
    """`counts` [N, C] as a PNG. Each cell is coloured by its number of samples; small grids carry the numbers too."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    n, c = counts.shape
    figure = Figure(figsize=(max(4.0, 0.42 * c + 1.6), max(3.0, min(0.24 * n, 14) + 1.2)), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(counts, aspect="auto", cmap="Blues", norm=mpl.colors.PowerNorm(0.5, vmin=0))
    if n <= 40 and c <= 20:
        for k, label in np.argwhere(counts > 0):
            dark = counts[k, label] > 0.45 * counts.max()
            axes.text(label, k, counts[k, label], ha="center", va="center", size=6, color="white" if dark else "black")
        axes.set_yticks(range(n), [str(k) for k in range(n)], size=7)
    if c <= 20:
        axes.set_xticks(range(c), classes, size=8, rotation=0 if max(map(len, classes)) < 4 else 60)
    axes.set(xlabel="class", ylabel="client", title=title)
    figure.colorbar(image, label="training samples")
    picture = io.BytesIO()
    # No date inside: the same partition gives the same bytes.
    figure.savefig(picture, format="png", dpi=150, metadata={"Software": None})
    return picture.getvalue()
