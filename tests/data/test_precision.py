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


def test_new_samples_and_a_saved_data_set_keep_the_numbers(tmp_path: Path) -> None:
    data, rows = data_of("frame", TIMES), frame(TIMES)[TEST]
    wanted = data.dataset.test_x
    assert torch.equal(data.samples(rows), wanted)
    assert torch.equal(data.samples(rows[["time", "other"]].to_numpy()), wanted)
    data.dataset.save(tmp_path / "x")
    assert torch.equal(type(data.dataset).read(tmp_path / "x").test_x, wanted)


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


def test_what_float32_holds_stays_float32() -> None:
    for first in (OTHER, SECONDS, np.full(200, 0.1), SECONDS + 0.5):
        assert data_of("frame", first).dataset.train_x.dtype is torch.float32


def test_whole_numbers_that_float64_cannot_hold_are_refused() -> None:
    nanoseconds = 1_700_000_000_000_000_000 + SECONDS
    for column in (nanoseconds, nanoseconds.astype(str)):
        with refuse(
            "column 'time' in row ",
            " = 17000000000000000",
            "allowed: whole numbers up to 2^53; subtract",
        ):
            nd.from_frame(frame(column), label="y")


def test_targets_that_float32_cannot_tell_apart_are_refused() -> None:
    table = pd.DataFrame({"time": TIMES, "other": OTHER})
    with refuse("column 'time': float32 can't tell its values apart; subtract a constant"):
        nd.from_frame(table, target="time")
