"""The pictures of docs/time_and_attacks.md show every number of the committed tables."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.figure import Figure

from research.experiments import pictures

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def _rows(name: str) -> list[dict[str, str]]:
    with (RESULTS / name).open(newline="") as file:
        return list(csv.DictReader(file))


def _drawn(figure: Figure) -> list[list[float]]:
    """Of each panel: what its points and bars show along x, ascending."""
    return [
        sorted(
            [float(x) for line in axes.lines for x in line.get_xdata()]
            + [bar.get_width() for bar in axes.patches]
        )
        for axes in figure.axes
    ]


@pytest.mark.parametrize(
    ("name", "panel", "draw", "panels"),
    [
        ("robust.csv", "skew", pictures.attacks, ["iid", "dirichlet05", "dirichlet01"]),
        ("clusters-values.csv", "scenario", pictures.clusters, ["rotated", "swapped"]),
    ],
)
def test_a_panel_shows_all_accuracies_of_its_setting(name, panel, draw, panels):
    by_panel = defaultdict[str, list[float]](list)
    for row in _rows(name):
        by_panel[row[panel]].append(100 * float(row["accuracy"]))

    drawn = _drawn(draw(pd.read_csv(RESULTS / name)))

    for values, setting in zip(drawn, panels, strict=True):
        assert values == pytest.approx(sorted(by_panel[setting])), setting
