"""FedDecorr (Shi et al. 2023) against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.core.data import Batch
from fedml_noniid.core.task import Output
from fedml_noniid.plugins.baselines.feddecorr import FedDecorr
from tests.methods import by_hand as hand

BETA, EPS = 0.4, 1e-8


def decorrelation(z: hand.Array) -> tuple[float, hand.Array]:
    """L of two dimensions and its derivative by z, [B, 2].

    Of the two elements beside the diagonal each is s = sum over the batch of x_1 x_2, so L = s^2 /
    B. With c = z - mean z, v = sum c^2 / (B - 1) + eps and s = sum c_1 c_2 / sqrt(v_1 v_2), ds/dz_1
    = c_2 / sqrt(v_1 v_2) - s c_1 / ((B - 1) v_1).
    """
    n = len(z)
    if n == 1:
        return 0.0, np.zeros_like(z)
    c = z - z.mean(0)
    v = (c**2).sum(0) / (n - 1) + EPS
    root = np.sqrt(v.prod())
    s = float(c.prod(1).sum() / root)
    ds = c[:, ::-1] / root - s * c / ((n - 1) * v)
    return s**2 / n, 2 * s / n * ds


@pytest.mark.parametrize(
    "options", [{"rounds": 3}, {"rounds": 4, "cohort": 2, "batch_size": 2}], ids=["full", "twos"]
)
def test_its_loss(engine: str, options: dict[str, int]) -> None:
    """On clients of 1, 2 and 3 samples: a batch of one has no correlations."""
    ran, parts = hand.run("feddecorr", {"feddecorr": {"beta": BETA}}, engine=engine, **options), []

    def loss(w: hand.Tree, _: hand.Tree, k: int, batch: hand.Array) -> tuple[float, hand.Tree]:
        x, y = hand.X[batch], hand.Y[batch]
        value, dh = decorrelation(hand.hidden(w, x))
        parts.append(value)
        return hand.loss(w, x, y) + BETA * value, hand.gradient(w, x, y, dh=BETA * dh)

    ran.follows(loss)
    assert max(parts) > 0.1


@pytest.mark.parametrize("padding", [0, 3])
def test_its_loss_by_the_correlation_matrix(padding: int) -> None:
    """NumPy's, of 7 samples in 4 dimensions; samples of padding count nothing."""
    rng = np.random.default_rng(1)
    z = rng.normal(size=(7, 4)) @ rng.normal(size=(4, 4))
    beside = np.corrcoef(z.T)[~np.eye(4, dtype=bool)]
    features = torch.tensor(np.concatenate([z, rng.normal(size=(padding, 4))]))
    mask = torch.tensor([1.0] * 7 + [0.0] * padding) if padding else None
    batch = Batch(features, torch.zeros(len(features)), mask)
    nobody: Any = None
    value = FedDecorr(beta=BETA).penalty({}, Output(features, features, {}), batch, nobody)
    assert value is not None
    wanted = BETA * np.mean((6 * beside) ** 2) / 7
    assert value.item() == pytest.approx(wanted, rel=1e-6)  # eps stands beside variances
