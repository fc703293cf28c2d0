"""rFedAvg's figure 1: features of single clients. Figures 9 to 11 are tables with a
picture."""

from __future__ import annotations

import numpy as np

from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines.reporting.figures import COLOURS, Values
from fedml_noniid.pipelines.reporting.text import as_csv
from research.papers.pictures import panels, png
from research.papers.rfedavg.features import Shown, discrepancy, of_clients
from research.runs import Measured
from research.targets import Built, Target, nothing

MARKERS = ("o", "^", "s")  # of the classes, as figure 1 has them


def features(target: Target, measured: Measured) -> Built:
    """Figure 1: t-SNE of three clients' features, a row per partition, embedded together within a
    row.

    Keys: `rows`: {title: address}; `classes`: whose samples.
    """
    classes = list(target.spec["classes"])
    by_title: dict[str, list[Shown]] = {}
    missing: list[str] = []
    for title, source in target.spec["rows"].items():
        runs = measured.finished(source, str(title), missing)
        try:
            by_title |= {str(title): of_clients(measured, source, runs[0], classes)} if runs else {}
        except UserError as error:
            missing.append(f"{title} ({error})")
    if not by_title:
        return nothing(missing)
    shown = [(title, client) for title, three in by_title.items() for client in three]
    points = [
        _embedded(np.concatenate([client.phi for client in three])) for three in by_title.values()
    ]
    begins = np.cumsum([0, *(len(client.label) for _, client in shown)])
    points_of = np.split(np.concatenate(points), begins[1:-1])
    figure, grid = panels(
        [f"{title}, client {client.client + 1}" for title, client in shown], len(classes)
    )
    lines = []
    for index, (axes, (title, client), at) in enumerate(zip(grid, shown, points_of, strict=True)):
        for c, marker, colour in zip(classes, MARKERS, COLOURS, strict=False):
            x, y = at[client.label == c].T
            axes.scatter(
                x, y, s=12, marker=marker, color=colour, label=f"class {c}", alpha=0.7, linewidths=0
            )
        axes.set(
            xlim=_around(points[index // 3][:, 0]),
            ylim=_around(points[index // 3][:, 1]),
            xticks=[],
            yticks=[],
        )
        lines += [
            (title, client.client + 1, int(c), *xy)
            for c, xy in zip(client.label, at.tolist(), strict=True)
        ]
    sentences = [
        (
            f"{title}: the mean features of the three clients are {discrepancy(three):.2f} "
            "apart on "
            "average (equation 2)."
        )
        for title, three in by_title.items()
    ]
    files = {"png": png(figure), "csv": as_csv(("row", "client", "class", "x", "y"), lines)}
    return Built((), files, tuple(sentences), tuple(missing))


def _embedded(phi: Values) -> Values:
    """t-SNE of features [n, d] in two dimensions, the same for the same features."""
    # Imported here, since it takes seconds and one figure needs it.
    from sklearn.manifold import TSNE

    embedding = TSNE(2, perplexity=min(30.0, (len(phi) - 1) / 3), init="pca", random_state=0)
    return np.asarray(embedding.fit_transform(phi), dtype=np.float64)


def _around(values: Values) -> tuple[float, float]:
    margin = 0.05 * float(np.ptp(values)) or 1.0
    return float(values.min()) - margin, float(values.max()) + margin
