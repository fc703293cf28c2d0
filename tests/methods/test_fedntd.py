"""FedNTD (Lee et al. 2022) against arithmetic by hand, with three classes: of two only one
is wrong, and there is nothing to distil."""

from __future__ import annotations

import numpy as np
import pytest

from fedml_noniid.models.networks import mlp
from tests.methods import by_hand as hand

BETA, TAU = 0.7, 1.6
SETTINGS: dict[str, dict[str, object]] = {"fedntd": {"beta": BETA, "tau": TAU}}
Y = np.array([0, 2, 1, 1, 0, 2])
W0 = hand.W0 | {
    "fc2.weight": np.array([[0.5, -0.8], [-0.3, 0.7], [0.4, 0.2]]),
    "fc2.bias": np.array([0.05, -0.15, 0.1]),
}


def not_true(z: hand.Array, y: int) -> hand.Array:
    """q: the softmax of z / tau over the classes but y, with 0 for y, [C]."""
    q = np.where(np.arange(len(z)) == y, 0.0, np.exp(z / TAU))
    found: hand.Array = q / q.sum()
    return found


def divergences(w: hand.Tree, w_t: hand.Tree, x: hand.Array, y: hand.Array) -> float:
    """L_NTD: tau^2 KL(q_g || q_l), the mean over the samples."""
    found = []
    for z_g, z, true in zip(hand.logits(w_t, x), hand.logits(w, x), y, strict=True):
        wrong = np.arange(3) != true
        q_g, q_l = not_true(z_g, true)[wrong], not_true(z, true)[wrong]
        found.append(TAU**2 * (q_g * np.log(q_g / q_l)).sum())
    return float(np.mean(found))


def gradient(w: hand.Tree, w_t: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
    """dCE/dz = p - onehot, dL_NTD/dz = tau (q_l - q_g), each by the size of the batch."""
    z_g, z = hand.logits(w_t, x), hand.logits(w, x)
    pulls = [
        not_true(of, true) - not_true(of_g, true) for of, of_g, true in zip(z, z_g, y, strict=True)
    ]
    do = hand.softmax(z) - np.eye(3)[y] + BETA * TAU * np.array(pulls)
    return hand.backward(w, x, do / len(y))


@pytest.mark.parametrize(
    "options", [{"rounds": 3}, {"rounds": 4, "cohort": 2, "batch_size": 2}], ids=["full", "twos"]
)
def test_its_loss(engine: str, options: dict[str, int]) -> None:
    network = hand.given(W0, net=mlp((2,), 3, hidden=2))
    of = hand.federation(y=Y)
    ran = hand.run("fedntd", SETTINGS, engine=engine, network=network, of=of, **options)

    def loss(w: hand.Tree, w_t: hand.Tree, k: int, batch: hand.Array) -> tuple[float, hand.Tree]:
        x, y = hand.X[batch], Y[batch]
        value = hand.loss(w, x, y) + BETA * divergences(w, w_t, x, y)
        return value, gradient(w, w_t, x, y)

    ran.follows(loss, W0)
