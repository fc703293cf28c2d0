"""The heat map of a partition, seen through its pixels."""

from __future__ import annotations

import io

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from fedml_noniid.pipelines.reporting.heatmap import MAX_ROWS, draw, heatmap


def drawn(counts: object, classes: tuple[str, ...], title: str = "title") -> NDArray[np.int64]:
    """The picture [height, width, 3]."""
    picture = heatmap(np.array(counts), classes, title)
    return np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).astype(np.int64)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((1, 2), "a long name "),
        ((500, 100), "c"),
    ],
)
def test_any_size_gives_a_picture_of_moderate_size(shape: tuple[int, int], name: str) -> None:
    counts = np.random.default_rng(0).integers(0, 30_000, shape)
    classes = tuple(f"{name}{c}" for c in range(shape[1]))
    picture = heatmap(counts, classes, "title")
    assert picture == heatmap(counts, classes, "title"), "a partition's bytes are determined"
    width, height = Image.open(io.BytesIO(picture)).size
    assert 500 < width < 2200 and 400 < height < 1700
    assert len(picture) < 300_000


def test_of_very_many_clients_some_are_drawn() -> None:
    """Their numbers stay on the axis."""
    axes, counts = Figure().subplots(), np.arange(2 * MAX_ROWS * 3).reshape(-1, 3)
    rows = np.asarray(draw(axes, counts, tuple("abc"), "title").get_array())
    assert axes.get_ylim() == (2 * MAX_ROWS - 0.5, -0.5)
    assert rows.shape == (MAX_ROWS, 3) and rows[-1].tolist() == counts[-1].tolist()


def test_clients_are_called_by_their_names() -> None:
    axes = Figure().subplots()
    draw(axes, np.ones((2, 2), np.int64), ("a", "b"), "title", ("Köln $1$", "a name " * 9))
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [r"Köln \$1\$", "a name a name a name a …"]


def test_dollars_in_names_are_no_mathematics(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if matplotlib knew no formulas."""
    names = ("$0-$10", "<$50_$", "a\\$b$")
    shown = drawn([[3, 4, 5]], names, "$s$")
    monkeypatch.setattr("fedml_noniid.pipelines.reporting.heatmap.verbatim", str)
    with mpl.rc_context({"text.parse_math": False}):
        assert np.array_equal(shown, drawn([[3, 4, 5]], names, "$s$"))
