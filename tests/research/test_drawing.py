"""Pictures of tables: what is drawn is what the table has, worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure

from research import drawing
from research.report import build
from research.runs import Measured
from research.targets import of_targets
from tests.research import by_hand
from tests.research.by_hand import diverged, is_picture, paper, run

TABLE = """\
t:
  kind: table
  title: A table
  protocol: []
  scale: 100
  gains: {B: A, C: A}
  columns: {Far: {scenario: far}, Near: {scenario: near}, Later: {scenario: later}}
  rows: {A: {study: one, recipe: a}, B: {study: one, recipe: b}, C: {study: one, recipe: c}}
"""
# Accuracies at the end by seed.
ENDS = {
    "near": {"a": [0.70, 0.72, 0.74], "b": [0.71, 0.75], "c": [0.5]},
    "far": {"b": [0.6], "c": [0.9]},
}


def drawn(root: Path, picture: str, monkeypatch: pytest.MonkeyPatch) -> list[Axes]:
    """The panels of a picture of ENDS: near has 3 clients, far 7; a seed of C diverged in far."""
    figures: list[Figure] = []
    paper(root, f"{TABLE}  picture: {picture}\n")
    for scenario, n in (("near", 3), ("far", 7)):
        for recipe, ends in ENDS[scenario].items():
            for seed, end in enumerate(ends):
                run(root, scenario, recipe, seed, [end], params={"scenario.clients": n})
    diverged(root, "far-c-1")
    png = drawing.png
    monkeypatch.setattr(drawing, "png", lambda figure: figures.append(figure) or png(figure))
    target = of_targets(by_hand.PAPER, root)["t"]
    built = build(target, Measured(by_hand.PAPER, by_hand.SIZE, root))
    assert is_picture(built) and built.table and "csv" in built.files
    (figure,) = figures
    return figure.axes


def bars(axes: Axes) -> Mapping[object, BarContainer]:
    """By the name of the line."""
    return {each.get_label(): each for each in axes.containers if isinstance(each, BarContainer)}


def names(ticks: list[object]) -> list[str]:
    return [tick.get_text() for tick in ticks]


def test_bars_have_mean_and_deviation_and_none_stands_for_a_diverged_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A: 72 with deviation 2, nothing in far. C: 50, and 90 in far, where a seed diverged."""
    panels = "{P: {}, Q: {columns: [Near], x: x, y: y}}"
    left, right = drawn(tmp_path, f"{{kind: bars, panels: {panels}}}", monkeypatch)
    heights = {name: [bar.get_height() for bar in of] for name, of in bars(left).items()}
    nan = float("nan")
    expected = {"A": [nan, 72], "B": [60, 73], "C": [nan, 50]}
    assert heights == {name: pytest.approx(of, nan_ok=True) for name, of in expected.items()}
    assert names(left.get_xticklabels()) == ["Far", "Near"]
    assert names(right.get_xticklabels()) == ["Near"]
    assert (right.get_xlabel(), right.get_ylabel()) == ("x", "y")
    ((_, _, (errors,)),) = [bars(right)["A"].errorbar]
    assert errors.get_segments()[0][:, 1] == pytest.approx([70, 74])


def test_gains_are_horizontal_bars_from_the_top(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B - A on the seeds of both: 1 and 3; C - A: -20. A has no gain."""
    spec = "{kind: barh, lines: columns, panels: {P: {columns: [Near]}}}"
    (axes,) = drawn(tmp_path, spec, monkeypatch)
    (of,) = bars(axes).values()
    assert [bar.get_width() for bar in of] == pytest.approx([2, -20])
    assert names(axes.get_yticklabels()) == ["B", "C"] and axes.yaxis_inverted()


def test_lines_take_x_from_the_runs_and_a_row_may_be_a_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B with 3 clients in near, 7 in far; C has one point. They look alike in both panels."""
    panels = "{P: {key: scenario.clients, log: true, level: A}, Q: {columns: [Near]}}"
    left, right = drawn(tmp_path, f"{{kind: lines, panels: {panels}}}", monkeypatch)
    points = {
        of.get_label(): of.lines[0] for of in left.containers if isinstance(of, ErrorbarContainer)
    }
    assert points["B"].get_xydata() == pytest.approx(np.array([[3, 73], [7, 60]]))
    assert points["C"].get_xydata() == pytest.approx(np.array([[3, 50]]))
    assert left.get_xscale() == "log" and list(points) == ["B", "C"]
    (level,) = [line for line in left.lines if line.get_label() == "A"]
    assert list(level.get_ydata()) == pytest.approx([72, 72])
    others = {of.get_label(): of.lines[0] for of in right.containers}
    assert others["B"].get_color() == points["B"].get_color()
    assert others["A"].get_color() != others["B"].get_color() != others["C"].get_color()


def test_every_client_is_a_point_and_the_worst_has_a_circle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first seed of B in far; client 2 has no test samples."""
    evaluation = by_hand.folder(tmp_path) / "evaluation" / "far-b-0"
    evaluation.mkdir(parents=True)
    (evaluation / "per_client.csv").write_text("client,test_accuracy\n0,0.5\n1,\n2,0.25\n3,1.0\n")
    spec = "{kind: clients, panels: {P: {columns: [Far]}}}"
    (axes,) = drawn(tmp_path, spec, monkeypatch)
    (of,) = [each for each in axes.containers if isinstance(each, ErrorbarContainer)]
    assert of.get_label() == "B" and of.lines[0].get_linestyle() == "None"
    assert of.lines[0].get_xydata() == pytest.approx(np.array([[1, 50], [3, 25], [4, 100]]))
    (ring,) = [each for each in axes.collections if isinstance(each, PathCollection)]
    assert ring.get_offsets().tolist() == [[3, 25]]


@pytest.mark.parametrize("kind", ["bars", "barh", "lines", "clients"])
def test_a_panel_without_numbers_is_empty(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (axes,) = drawn(tmp_path, f"{{kind: {kind}, panels: {{P: {{columns: [Later]}}}}}}", monkeypatch)
    assert axes.get_title(loc="left") == "P"
    assert not axes.patches and not axes.get_legend_handles_labels()[1][1:]


def test_a_table_without_numbers_has_no_picture(tmp_path: Path) -> None:
    paper(tmp_path, f"{TABLE}  picture: {{kind: bars, panels: {{P: {{}}}}}}\n")
    target = of_targets(by_hand.PAPER, tmp_path)["t"]
    assert "png" not in build(target, Measured(by_hand.PAPER, by_hand.SIZE, tmp_path)).files
