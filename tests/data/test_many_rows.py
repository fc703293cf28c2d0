"""Arrays of a user with very many samples and owners are read in array code."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedml_noniid.data import dataset
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.readers import arrays, user_data
from tests.work import calls, peak_bytes

FEATURES = 4


def of(n: int) -> Dataset:
    """`n` training samples of n / 2 owners, half as many test samples."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(n, FEATURES)).astype(np.float32), rng.integers(3, 8, n)
    owner = rng.permutation(n) // 2
    train = {"x": x, "y": y, "owner": owner}
    half = {f"test_{key}": values[: n // 2] for key, values in train.items()}
    return Dataset.from_raw("made", arrays.of_named(train | half))


def test_no_python_for_each_sample_or_owner() -> None:
    few, many = 5_000, 40_000
    of(few)  # what is imported and cached on the first use
    before = calls(lambda: of(few))
    assert calls(lambda: of(many)) < before + (many - few) / 100
    grown = peak_bytes(lambda: of(many)) - peak_bytes(lambda: of(few))
    assert grown < 300 * (many - few)  # bytes, of samples with 32


def test_samples_are_copied_once() -> None:
    """The data set is a copy of the user's arrays; nothing else of their size is made."""
    x = np.random.default_rng(0).normal(size=(40_000, 64)).astype(np.float32)
    named = dict.fromkeys(("y", "test_y"), np.arange(40_000) % 2) | {"x": x, "test_x": x[::-1]}
    peak = peak_bytes(lambda: Dataset.from_raw("made", arrays.of_named(named)))
    assert 2 * x.nbytes <= peak < 3.0 * x.nbytes


def test_samples_that_differ_in_few_bits_have_other_hashes() -> None:
    """A sum of products alone would be equal for some; zeros of two signs differ."""
    bits = np.eye(96, dtype=np.uint8)
    rows = np.unique(np.maximum(bits[:, None], bits[None]).reshape(-1, 96), axis=0)
    rows = torch.from_numpy(np.packbits(rows, axis=1))
    assert len(np.unique(user_data._hashes(rows))) == len(rows) == 96 * 97 // 2
    x = torch.tensor([[0.0, 1.0], [2.0, 3.0]])
    assert user_data._repeated(x, torch.tensor([[-0.0, 1.0]])) == []


@pytest.mark.parametrize(("n", "d"), [(3, 2), (100, 5), (101, 17), (1000, 64)])
def test_mean_and_deviation_have_the_bits_of_numpy(
    n: int, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "PIECE", 50)
    rng = np.random.default_rng(n)
    x = (rng.normal(size=(n, d)) * 10.0 ** rng.integers(-3, 4, d)).astype(np.float32)
    x[:, 0] = 0.1
    mean, std = dataset._moments(torch.from_numpy(x))
    wide = x.astype(np.float64)
    assert mean == tuple(wide.mean(0).tolist())
    assert std == (1.0, *wide.std(0)[1:].tolist())
