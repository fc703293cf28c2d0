"""FedFTG (Zhang et al.

2022), algorithm 1 with the terms of the authors' code, against arithmetic by hand.

The model's gradient is written out; the generator's is taken by central differences of a loss
written in NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.core.component import Server
from fedml_noniid.core.randomness import fold, identity, normal, uniform
from fedml_noniid.data.streams import key
from fedml_noniid.plugins.baselines.fedftg import FedFTG
from tests import federation
from tests.methods import by_hand as hand
from tests.methods.test_fedgen import slopes

SMALL: dict[str, Any] = {
    "iterations": 2,
    "generator_steps": 1,
    "model_steps": 2,
    "batch_size": 5,
    "noise_dim": 2,
    "hidden": 3,
    "generator_lr": 0.02,
    "server_lr": 0.4,
    "lambda_cls": 0.8,
    "lambda_dis": 1.2,
}
ONE_HOT = np.eye(2)


def server_key(t: int, seed: int = 0) -> torch.Tensor:
    """FedFTG's own in round t."""
    return fold(torch.tensor(key(seed, "server", t)), identity(FedFTG()))


def made(g: hand.Tree, z: hand.Array, y: hand.Array) -> hand.Array:
    """x = tanh(W2 a(W1 [z, onehot(y)] + b1) + b2), a with slope 0.2 below 0; then mean 0, variance
    1 per input."""
    a = np.concatenate([z, ONE_HOT[y]], axis=1) @ g["w1"].T + g["b1"]
    x = np.tanh(np.where(a > 0, a, 0.2 * a) @ g["w2"].T + g["b2"])
    return np.asarray((x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5))


class Reference:
    """The server's side of algorithm 1, of one round after the other."""

    def __init__(self, g: hand.Tree, numbers: dict[str, Any]) -> None:
        self.g, self.n = g, numbers

    def loss(
        self,
        g: hand.Tree,
        given: hand.Array,
        student: hand.Tree,
        clients: list[hand.Tree],
        share: hand.Array,
        y: hand.Array,
        z: hand.Array,
    ) -> float:
        """-L_md + lambda_cls L_cls + lambda_dis L_dis; `given`: the clients' logits, which L_md
        takes as numbers."""
        x = made(g, z, y)
        s = hand.logits(student, x)
        md = cls = 0.0
        for k, w_k in enumerate(clients):
            md += (share[k] * np.abs(s - given[k]).mean(1)).mean()
            cls += (share[k] * -np.log(hand.softmax(hand.logits(w_k, x))[range(len(y)), y])).mean()
        pairs = [(i, j) for i in range(len(y)) for j in range(len(y))]
        dis = np.exp(
            -np.mean([((z[i] - z[j]) ** 2).mean() * np.abs(x[i] - x[j]).mean() for i, j in pairs])
        )
        return float(-md + self.n["lambda_cls"] * cls + self.n["lambda_dis"] * dis)

    def round(
        self, t: int, w: hand.Tree, clients: list[hand.Tree], counts: hand.Array
    ) -> hand.Tree:
        optimizer = hand.Adam(self.g)  # begins anew
        for i in range(self.n["iterations"]):
            at = fold(server_key(t), i)
            u = uniform(fold(at, "y"), 5, dtype=torch.float64).numpy() * counts.sum()
            y = np.array([int(u_i >= counts[:, 0].sum()) for u_i in u])  # p(y) ~ sum_k n_k^y
            z = normal(fold(at, "z"), 5, 2, dtype=torch.float64).numpy()
            share = counts[:, y] / counts[:, y].sum(0)  # alpha_k^y
            for _ in range(self.n["generator_steps"]):
                given = np.array([hand.logits(w_k, made(self.g, z, y)) for w_k in clients])
                grads = slopes(
                    lambda g, w=w, given=given, share=share, y=y, z=z: self.loss(
                        g, given, w, clients, share, y, z
                    ),
                    self.g,
                )
                self.g = optimizer.step(self.g, grads, self.n["generator_lr"])
            x = made(self.g, z, y)
            target = sum(
                share[k][:, None] * hand.softmax(hand.logits(w_k, x))
                for k, w_k in enumerate(clients)
            )
            for _ in range(self.n["model_steps"]):
                # the mean is over B and C
                do = (hand.softmax(hand.logits(w, x)) - target) / (5 * 2)
                g_w = hand.backward(w, x, do)
                w = hand.each(lambda leaf, g: leaf - self.n["server_lr"] * g, w, g_w)
        return w


@pytest.mark.parametrize(
    "numbers",
    [{}, {"generator_steps": 3, "model_steps": 1}, {"generator_steps": 0, "iterations": 3}],
    ids=str,
)
def test_two_rounds(engine: str, numbers: dict[str, Any]) -> None:
    ran = hand.run("fedftg", {"fedftg": SMALL | numbers}, engine=engine, cohort=2)
    first = hand.run("fedftg", {"fedftg": SMALL}, rounds=0).state("fedftg")["generator"]
    reference = Reference(hand.arrays(first), SMALL | numbers)
    w = hand.W0
    for t, (ask, reply) in enumerate(ran.exchanges, start=1):
        clients = [hand.descend(w, [hand.CLIENTS[k]] * 2) for k in ask.to]
        counts = np.array([[(hand.Y[hand.CLIENTS[k]] == c).sum() for c in (0, 1)] for k in ask.to])
        np.testing.assert_array_equal(reply.upload["fedftg"]["counts"], counts)
        w = reference.round(t, hand.average(hand.shares(ask.to), clients), clients, counts)
    hand.same(ran.outcome.params, w, rtol=1e-5)
    hand.same(ran.state("fedftg")["generator"], reference.g, rtol=1e-4)
    hand.same(ran.outcome.evaluated, w, rtol=1e-5)


def test_the_students_running_statistics_move() -> None:
    ran, plain = (
        federation.run(recipe, batch_norm=True, rounds=1) for recipe in ("fedftg", "fedavg")
    )
    assert not any(torch.equal(ran.buffers[name], leaf) for name, leaf in plain.buffers.items())


@pytest.mark.parametrize("shape", [(7,), (3, 4, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_have_the_datas_shape_and_moments(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Mean 0 and variance 1 per channel: over batch and positions of an image, over the batch of a
    vector."""
    task = federation.simulation("fedavg").engine.clients.task
    server = Server(task, {"w": torch.zeros(1, dtype=dtype)}, {}, 0, 6, shape, keys=torch.tensor(0))
    method = FedFTG(noise_dim=6)
    g = method.init_server(server)["generator"]
    z = normal(torch.tensor(1), 40, 6, dtype=dtype)
    x = method.inputs(server, g, z, torch.arange(40) % 3)
    assert (x.shape, x.dtype) == ((40, *shape), dtype)
    rest = tuple(axis for axis in range(x.ndim) if axis != 1)
    np.testing.assert_allclose(x.mean(rest), 0, atol=1e-5)
    np.testing.assert_allclose(x.var(rest, unbiased=False), 1, rtol=2e-2)
    if len(shape) > 1:
        assert x.mean(0).abs().min() < 0.05 < x.mean(0).abs().max(), (
            "a position by itself has a mean"
        )
