"""Numbers that differ in float64 differ in training, or a line says that they do not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedml_noniid as nd
from tests.data.reading import refuse

RNG = np.random.default_rng(0)
SECONDS = RNG.integers(0, 60, 200)
TIMES = 1.7e9 + SECONDS  # float32 has every 128th second here
OTHER = RNG.normal(size=200)
TEST = slice(160, 200)
Y = np.where(SECONDS > 30, "late", "early")


def frame(first: object) -> pd.DataFrame:
    return pd.DataFrame({"time": first, "other": OTHER, "y": Y})


def data_of(kind: str, first: np.ndarray) -> nd.Data:
    """The same numbers as a table, as arrays, as several inputs; the last 40 samples test."""
    if kind == "frame":
        rows = frame(first)
        return nd.from_frame(rows[:160], rows[TEST], label="y")
    x = np.column_stack([first, OTHER])
    wanted = (x[:160], Y[:160], x[TEST], Y[TEST])
    if kind == "arrays":
        return nd.from_arrays(*wanted)
    parts = [{"time": part[:, 0], "other": part[:, 1]} for part in (wanted[0], wanted[2])]
    return nd.from_arrays(parts[0], Y[:160], parts[1], Y[TEST])


@pytest.mark.parametrize("kind", ["frame", "arrays", "inputs"])
@pytest.mark.parametrize(
    "first", [TIMES, 1e4 + OTHER, 1e7 + 1e-2 * OTHER], ids=("times", "1e4", "1e7")
)
def test_columns_are_centred_in_float64(kind: str, first: np.ndarray) -> None:
    data = data_of(kind, first)
    x = np.column_stack([first, OTHER])
    wanted = ((x - x[:160].mean(0)) / x[:160].std(0)).astype(np.float32)
    for part, rows in (("train", slice(160)), ("test", TEST)):
        found = data.dataset.normalised(part)
        assert found.dtype is torch.float32
        np.testing.assert_allclose(found, wanted[rows], atol=1e-5)
    assert not [note for note in data.notes if "float32" in note or "constant" in note]
    if kind == "frame":
        assert torch.equal(data.samples(frame(first)[TEST]), data.dataset.test_x)


@pytest.mark.parametrize(
    ("first", "normalise", "counts"),
    [
        (TIMES, "none", (1, 60)),
        # z of the seconds is about 1 / 1.7e8 apart, near 0.1, where float32 has steps of 7e-9.
        (np.where(np.arange(200) % 50, TIMES, 0), "channel", None),
        (np.where(np.arange(200) % 50, SECONDS, 1e12), "channel", (2, 61)),
    ],
    ids=("not centred", "zeros", "far off"),
)
def test_a_note_says_where_float32_loses_values(
    first: np.ndarray, normalise: str, counts: tuple[int, int] | None
) -> None:
    data = nd.from_frame(frame(first), frame(first), label="y", normalise=normalise)
    (note,) = [note for note in data.notes if "float32" in note]
    assert "different values apart in column 'time', after `normalise`" in note
    if counts is not None:
        assert f"only {counts[0]} of {len(np.unique(first))}" in note


@pytest.mark.parametrize("kind", [int, str])
def test_whole_numbers_that_float64_cannot_hold_are_refused(kind: type) -> None:
    column = (1_700_000_000_000_000_000 + SECONDS).astype(kind)
    with refuse("column 'time' in row ", " = 17000000", "allowed: whole numbers up to 2^53"):
        nd.from_frame(frame(column), label="y")


def test_a_missing_cell_hides_no_digits(tmp_path: Path) -> None:
    """With it, pandas reads the whole numbers of a CSV as floats."""
    cells = [str(1_700_000_000_000_000_001 + 2 * i) if i else "" for i in range(200)]
    frame(cells).to_csv(tmp_path / "a.csv", index=False)
    with refuse("column 'time' in row 2 = 17000000", "allowed: whole numbers up to 2^53"):
        nd.load("table", root=tmp_path, file="a.csv", label="y", missing="median")


def test_targets_that_float32_cannot_tell_apart_are_refused() -> None:
    table = pd.DataFrame({"time": TIMES, "other": OTHER})
    with refuse("column 'time': float32 can't tell its values apart; subtract a constant"):
        nd.from_frame(table, target="time")
