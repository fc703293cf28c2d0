"""FedGen (Zhu et al.

2021), algorithm 1 with the terms of the authors' code, against arithmetic by hand.

The client's gradient is written out; the generator's is taken by central differences of a loss
written in NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.core.randomness import fold, identity, integers, step_key, uniform
from fedml_noniid.data.streams import key
from fedml_noniid.plugins.baselines.fedgen import FedGen
from tests.methods import by_hand as hand

SCOPE = identity(FedGen())  # of its keys
SMALL: dict[str, Any] = {
    "generative_alpha": 0.7,
    "generative_beta": 1.3,
    "decay": 0.5,
    "gen_batch_size": 3,
    "hidden": 3,
    "noise_dim": 2,
    "steps": 2,
    "batch_size": 4,
    "generator_lr": 0.02,
    "weight_decay": 0.1,
    "alpha": 0.9,
    "eta": 1.5,
}
ONE_HOT = np.eye(2)


def made(g: hand.Tree, eps: hand.Array, y: hand.Array) -> hand.Array:
    """G(y, eps) = W2 max(0, W1 [eps, onehot(y)] + b1) + b2."""
    h = np.maximum(np.concatenate([eps, ONE_HOT[y]], axis=1) @ g["w1"].T + g["b1"], 0)
    return np.asarray(h @ g["w2"].T + g["b2"])


def head(w: hand.Tree, features: hand.Array) -> hand.Array:
    return np.asarray(features @ w["fc2.weight"].T + w["fc2.bias"])


def draw(at: torch.Tensor, rows: int) -> hand.Array:
    return uniform(at, rows, 2, dtype=torch.float64).numpy()


def slopes(loss: Callable[[hand.Tree], float], at: hand.Tree, step: float = 1e-6) -> hand.Tree:
    """Central differences."""
    found = hand.each(np.zeros_like, at)
    for name, leaf in at.items():
        for place in np.ndindex(leaf.shape):
            up, down = ({key: value.copy() for key, value in at.items()} for _ in range(2))
            up[name][place] += step
            down[name][place] -= step
            found[name][place] = (loss(up) - loss(down)) / (2 * step)
    return found


def local(
    w: hand.Tree, g: hand.Tree, weight: float, client_key: torch.Tensor, batches: list[hand.Array]
) -> hand.Tree:
    """Steps on CE + weight (alpha' CE(head(G(y', eps')), y') + beta' KL(softmax(head(G(y, eps))) ||
    p))."""
    for s, batch in enumerate(batches):
        x, y, at = hand.X[batch], hand.Y[batch], step_key(client_key, s, SCOPE)
        p = hand.softmax(hand.logits(w, x))
        target = hand.softmax(head(w, made(g, draw(fold(at, "eps"), len(y)), y)))
        # d/do of CE is p - onehot, of KL(target || softmax(o)) it is p - target; both are means
        # over the batch.
        do = ((p - ONE_HOT[y]) + weight * SMALL["generative_beta"] * (p - target)) / len(y)
        grads = hand.backward(w, x, do)
        new_y = integers(fold(at, "y'"), 2, 3).numpy()
        f = made(g, draw(fold(at, "eps'"), 3), new_y)
        df = weight * SMALL["generative_alpha"] * (hand.softmax(head(w, f)) - ONE_HOT[new_y]) / 3
        grads["fc2.weight"] += df.T @ f
        grads["fc2.bias"] += df.sum(0)
        w = hand.each(lambda leaf, g: leaf - hand.LR * g, w, grads)
    return w


class Server:
    """The generator, with Adam's state."""

    def __init__(self, g: hand.Tree) -> None:
        self.g, self.adam = g, hand.Adam(g)

    def round(
        self, t: int, w: list[hand.Tree], student: hand.Tree, counts: hand.Array, beta: float
    ) -> None:
        for s in range(SMALL["steps"]):
            at = fold(fold(torch.tensor(key(0, "server", t)), SCOPE), s)
            u = uniform(fold(at, "y"), 4, dtype=torch.float64).numpy() * counts.sum()
            y = np.array([int(u_i >= counts[:, 0].sum()) for u_i in u])
            eps = draw(fold(at, "eps"), 4)

            def loss(g: hand.Tree, y: hand.Array = y, eps: hand.Array = eps) -> float:
                f = made(g, eps, y)
                teacher, mixed = 0.0, np.zeros((4, 2))
                for k, w_k in enumerate(w):
                    share = counts[k, y] / counts[:, y].sum(0)
                    teacher += (share * -np.log(hand.softmax(head(w_k, f))[range(4), y])).mean()
                    mixed += share[:, None] * head(w_k, f)
                pairs = [(i, j) for i in range(4) for j in range(4)]
                far = [
                    ((eps[i] - eps[j]) ** 2).mean() * np.abs(f[i] - f[j]).mean() for i, j in pairs
                ]
                value = SMALL["alpha"] * teacher + SMALL["eta"] * np.exp(-np.mean(far))
                q, p = hand.softmax(mixed), hand.softmax(head(student, f))
                return float(value - beta * (q * np.log(q / p)).mean())

            # Adam with coupled weight decay; its step shrinks by `decay` a round, its state goes
            # on.
            grads = hand.each(
                lambda g, w: g + SMALL["weight_decay"] * w, slopes(loss, self.g), self.g
            )
            lr = SMALL["generator_lr"] * SMALL["decay"] ** (t - 1)
            self.g = self.adam.step(self.g, grads, lr)


@pytest.mark.parametrize("beta", [0.0, 0.4])
def test_three_rounds(engine: str, beta: float) -> None:
    """Mini-batches of 2 on ragged clients; the cohort's models teach the generator that the next
    round learns from."""
    ran = hand.run(
        "fedgen", {"fedgen": SMALL | {"beta": beta}}, engine=engine, rounds=3, batch_size=2
    )
    server = Server(hand.arrays(ran.exchanges[0][0].shared["fedgen"]["generator"]))
    counts = np.array([[(hand.Y[client] == c).sum() for c in (0, 1)] for client in hand.CLIENTS])
    for t, (ask, reply) in enumerate(ran.exchanges, start=1):
        sent = ask.shared["fedgen"]
        hand.same(sent["generator"], server.g, rtol=1e-5)
        assert sent["weight"].item() == (0.0, 0.5, 0.25)[t - 1]
        np.testing.assert_array_equal(reply.upload["fedgen"]["counts"], counts)

        # From the generator that was sent: differences are only known to about 1e-9.
        start, g = hand.arrays(ask.params), hand.arrays(sent["generator"])
        keys = ran.simulation.engine.clients.keys(ask, t)
        w = [local(start, g, sent["weight"].item(), keys[k], ran.batches(k, t)) for k in range(3)]
        for k in range(3):
            hand.same({name: leaf[k] for name, leaf in ran.trained(t - 1).items()}, w[k])
        server.round(t, w, hand.average(np.array(hand.SIZES) / 6, w), counts, beta)
    hand.same(ran.state("fedgen")["generator"], server.g, rtol=1e-5)
    hand.same(ran.outcome.params, hand.average(np.array(hand.SIZES) / 6, w))
