"""FedLC (Zhang et al.

2022) against arithmetic by hand, with three classes of which no client has all.

The labels are 0; 1, 2; 1, 1, 0. Padding points at sample 0, whose class client 1 does not have.
"""

from __future__ import annotations

import numpy as np
import pytest

from fedml_noniid.models.networks import mlp
from tests.methods import by_hand as hand

Y = np.array([0, 1, 2, 1, 1, 0])
COUNTS = np.array([[1, 0, 0], [0, 1, 1], [1, 2, 0]])
TAU = 0.8
W0: hand.Tree = hand.W0 | {
    "fc2.weight": np.array([[0.5, -0.8], [-0.3, 0.7], [0.4, 0.2]]),
    "fc2.bias": np.array([0.05, -0.15, 0.1]),
}
ABSENT = pytest.mark.parametrize("absent", ["masked", "floor"])


@pytest.fixture(autouse=True)
def three_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hand, "Y", Y)


def network(start: hand.Tree = W0) -> hand.Given:
    return hand.given(start, net=mlp((2,), 3, hidden=2))


def calibrated(
    o: hand.Array, y: hand.Array, n: hand.Array, tau: float, absent: str
) -> tuple[float, hand.Array]:
    """Mean of -log(e^{z_y} / sum e^{z_c}) and its derivative by o; z_c = o_c - tau n_c^(-1/4), over
    all c."""
    z = o - tau * np.maximum(n, 1).astype(float) ** -0.25
    if absent == "masked":
        z[:, n == 0] = -np.inf  # also for tau = 0
    e, true = np.exp(z), np.eye(3)[y]
    rows = np.arange(len(y))
    loss = np.log(e.sum(1)) - z[rows, y]
    return float(loss.mean()), (e / e.sum(1, keepdims=True) - true) / len(y)


@ABSENT
@pytest.mark.parametrize("tau", [TAU, 0.0])
@pytest.mark.parametrize(
    "options", [{}, {"rounds": 4, "cohort": 2, "batch_size": 2}], ids=["full", "twos"]
)
def test_its_loss(engine: str, absent: str, tau: float, options: dict[str, int]) -> None:
    """Clients of 1, 2, 3 samples side by side: padding of a class that client 1 lacks. Counts are
    the client's, not the batch's; some clients have done with their steps before others."""
    settings = {"fedlc": {"absent": absent, "tau": tau}}
    ran = hand.run("fedlc", settings, engine=engine, network=network(), **options)

    def loss(w: hand.Tree, _: hand.Tree, k: int, batch: hand.Array) -> tuple[float, hand.Tree]:
        x = hand.X[batch]
        value, do = calibrated(hand.logits(w, x), Y[batch], COUNTS[k], tau, absent)
        return value, hand.backward(w, x, do)

    ran.follows(loss, W0)
