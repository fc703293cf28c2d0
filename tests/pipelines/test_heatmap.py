"""The heat map of a partition, seen through its pixels."""

from __future__ import annotations

import io
from collections.abc import Callable

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from fedml_noniid.pipelines.reporting.heatmap import MAX_ROWS, draw, heatmap
from tests.work import calls


def drawn(counts: object, classes: tuple[str, ...], title: str = "title") -> NDArray[np.int64]:
    """The picture [height, width, 3]."""
    picture = heatmap(np.array(counts), classes, title)
    return np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).astype(np.int64)


def dark(pixels: NDArray[np.int64]) -> NDArray[np.int64]:
    """Rows and columns of the pixels of the darkest colour: those of the fullest cells, and the end
    of the scale."""
    return np.argwhere((np.abs(pixels - [8, 48, 107]) < 6).all(2))


def test_clients_are_rows_and_classes_are_columns() -> None:
    """All samples of client 0 and class 1 of 2: the dark cell is above, in the right half of the
    cells."""
    for at in ((0, 1), (1, 0)):
        counts = np.zeros((2, 2), int)
        counts[at] = 50
        pixels = drawn(counts, ("a", "b"))
        height, width, _ = pixels.shape
        # The cells are in the left half and more; the bars and the scale are to their right.
        where = dark(pixels[:, : width // 2])
        assert len(where) > 2000
        middle = where.mean(0)
        assert (middle[0] < 0.45 * height) == (at[0] == 0)
        assert (middle[1] > 0.25 * width) == (at[1] == 1)


def test_none_is_white_and_one_is_not() -> None:
    """The share of white in the cells of 10 x 10 with nothing in half of them, and with one sample
    in that half."""
    shares = []
    for few in (0, 1):
        counts = np.full((10, 10), 2000)
        counts[:, 5:] = few
        pixels = drawn(counts, tuple("abcdefghij"))
        height, width, _ = pixels.shape
        part = pixels[height // 4 : height // 2, int(0.36 * width) : int(0.6 * width)]
        shares.append((part == 255).all(2).mean())
    assert shares[0] > 0.85 and shares[1] < 0.05


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((1, 2), "c"),
        ((500, 10), "a long name "),
        ((500, 100), "c"),
    ],
)
def test_any_size_gives_a_picture_of_moderate_size(shape: tuple[int, int], name: str) -> None:
    counts = np.random.default_rng(0).integers(0, 30_000, shape)
    picture = heatmap(counts, tuple(f"{name}{c}" for c in range(shape[1])), "title")
    width, height = Image.open(io.BytesIO(picture)).size
    assert 500 < width < 2200 and 400 < height < 1700
    assert len(picture) < 300_000


def test_clients_are_called_by_their_names() -> None:
    axes = Figure().subplots()
    draw(axes, np.ones((2, 2), np.int64), ("a", "b"), "title", ("Köln $1$", "a name " * 9))
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names == [r"Köln \$1\$", "a name a name a name a …"]


def test_of_very_many_clients_some_are_drawn() -> None:
    """The picture's work does not grow with the clients, whose numbers stay on the axis."""

    def drawn(n: int) -> Callable[[], object]:
        return lambda: heatmap(np.ones((n, 3), np.int64), tuple("abc"), "title")

    drawn(2 * MAX_ROWS)()
    assert calls(drawn(10 * MAX_ROWS)) < 1.1 * calls(drawn(2 * MAX_ROWS))
    axes = Figure().subplots()
    counts = np.arange(2 * MAX_ROWS * 3).reshape(-1, 3)
    image = draw(axes, counts, tuple("abc"), "title")
    assert axes.get_ylim() == (2 * MAX_ROWS - 0.5, -0.5)
    assert axes.get_ylabel() == "client (4,000 of 8,000 are drawn)"
    rows = np.asarray(image.get_array())
    assert rows.shape == (MAX_ROWS, 3) and rows[-1].tolist() == counts[-1].tolist()


def test_the_same_counts_give_the_same_bytes() -> None:
    counts = np.arange(20).reshape(2, 10)
    assert len({heatmap(counts, tuple("abcdefghij"), "title") for _ in range(2)}) == 1


@pytest.mark.parametrize("names", [("$0-$10", "$10-$20"), ("<$50_$", "$50%$ off"), ("a\\$b", "c$")])
def test_dollars_in_names_are_no_mathematics(
    names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if matplotlib knew no formulas."""
    found = drawn([[3, 4]], names, "$s$")
    monkeypatch.setattr("fedml_noniid.pipelines.reporting.heatmap.verbatim", str)
    with mpl.rc_context({"text.parse_math": False}):
        assert np.array_equal(found, drawn([[3, 4]], names, "$s$"))
