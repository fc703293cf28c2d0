"""FedDecorr (Shi et al. 2023) against arithmetic by hand, and the two forms of its loss."""

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
    ran = hand.run("feddecorr", {"feddecorr": {"beta": BETA}}, engine=engine, **options)
    w, parts = hand.W0, []
    for t, cohort, batches in ran.rounds():
        local, losses = [], []
        for of_client in batches:
            w_k, of_steps = w, []
            for batch in of_client:
                x, y = hand.X[batch], hand.Y[batch]
                value, dh = decorrelation(hand.hidden(w_k, x))
                parts.append(value)
                of_steps.append(hand.loss(w_k, x, y) + BETA * value)
                g = hand.gradient(w_k, x, y, dh=BETA * dh)
                w_k = hand.each(lambda leaf, g: leaf - hand.LR * g, w_k, g)
            local.append(w_k)
            losses.append(np.mean(of_steps))
        n = np.array([hand.SIZES[k] for k in cohort])
        w = hand.average(n / n.sum(), local)
        assert ran.outcome.rows[t - 1]["local_loss"] == pytest.approx(np.mean(losses), rel=1e-10)
    hand.same(ran.outcome.params, w, rtol=1e-9)
    assert max(parts) > 0.1


@pytest.mark.parametrize("padding", [0, 3])
def test_the_two_forms_by_the_correlation_matrix(padding: int) -> None:
    """NumPy's, of 7 samples in 4 dimensions; samples of padding count nothing."""
    rng = np.random.default_rng(1)
    z = rng.normal(size=(7, 4)) @ rng.normal(size=(4, 4))
    beside = np.corrcoef(z.T)[~np.eye(4, dtype=bool)]
    wanted = {"code": np.mean((6 * beside) ** 2) / 7, "paper": (beside**2).sum() / 4**2}
    features = torch.tensor(np.concatenate([z, rng.normal(size=(padding, 4))]))
    mask = torch.tensor([1.0] * 7 + [0.0] * padding) if padding else None
    batch = Batch(features, torch.zeros(len(features)), mask)
    nobody: Any = None
    for form, value in wanted.items():
        method = FedDecorr(beta=BETA, form=form)  # type: ignore[arg-type]  # one of its words
        found = method.penalty({}, Output(features, features, {}), batch, nobody)
        assert found is not None
        assert found.item() == pytest.approx(BETA * value, rel=1e-6)  # eps stands beside variances
