"""MOON (Li et al. 2021), algorithm 1, against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.core.component import Client
from fedml_noniid.core.data import Batch
from fedml_noniid.core.task import Output
from fedml_noniid.plugins.baselines.moon import MOON
from tests.methods import by_hand as hand

MU, TAU = 0.8, 0.4
SETTINGS: dict[str, dict[str, object]] = {"moon": {"mu": MU, "tau": TAU}}


def unit(z: hand.Array) -> hand.Array:
    """Rows of length 1; a zero stays zero."""
    length = np.linalg.norm(z, axis=1, keepdims=True)
    return z / np.where(length > 0, length, 1)


def contrast(z: hand.Array, z_glob: hand.Array, z_prev: hand.Array) -> tuple[float, hand.Array]:
    """Eq. 3: the mean of l_con over the batch, and its derivative by z, [B, d]."""
    u, g, p = unit(z), unit(z_glob), unit(z_prev)
    positive, negative = (u * g).sum(1), (u * p).sum(1)
    e_pos, e_neg = np.exp(positive / TAU), np.exp(negative / TAU)
    value = float(-np.log(e_pos / (e_pos + e_neg)).mean())
    # d cos(z, b) / dz = (b/|b| - cos z/|z|) / |z|
    length = np.linalg.norm(z, axis=1, keepdims=True)
    d_cos = [
        (b - c[:, None] * u) / np.where(length > 0, length, 1)
        for b, c in ((g, positive), (p, negative))
    ]
    share = (e_neg / (e_pos + e_neg) / TAU)[:, None]
    return value, share * (d_cos[1] - d_cos[0]) / len(z)


@pytest.mark.parametrize(
    "options", [{"rounds": 3}, {"rounds": 5, "cohort": 2, "batch_size": 2}], ids=["full", "twos"]
)
def test_its_lines(engine: str, options: dict[str, int]) -> None:
    """The previous model is that of the client's last participation, not of the last round."""
    ran = hand.run("moon", SETTINGS, engine=engine, **options)
    ends = [hand.W0] * 3  # before its first participation: w_0
    previous = list(ends)

    def loss(w: hand.Tree, w_t: hand.Tree, k: int, batch: hand.Array) -> tuple[float, hand.Tree]:
        if w is w_t:  # the first step of a round
            previous[k] = ends[k]
        x, y = hand.X[batch], hand.Y[batch]
        l_con, dz = contrast(hand.hidden(w, x), hand.hidden(w_t, x), hand.hidden(previous[k], x))
        g = hand.gradient(w, x, y, dh=MU * dz)
        ends[k] = hand.each(lambda w, g: w - hand.LR * g, w, g)
        return hand.loss(w, x, y) + MU * l_con, g

    ran.follows(loss)
    for k in range(3):
        hand.same(hand.row(ran.memory("moon")["w"], k), ends[k])


def test_features_of_zero_have_cosine_zero_and_no_gradient(engine: str) -> None:
    """A bias so low that no neuron is ever active: l_con = log 2, and only the classifier's bias
    learns."""
    dead = hand.W0 | {"fc1.bias": np.array([-9.0, -9.0])}
    moon, plain = (
        hand.run(recipe, engine=engine, network=hand.given(dead)).outcome
        for recipe in ("moon", "fedavg")
    )
    assert all(torch.equal(moon.params[key], plain.params[key]) for key in plain.params)
    for a, b in zip(moon.rows, plain.rows, strict=True):
        assert a["local_loss"] == pytest.approx(b["local_loss"] + np.log(2), rel=1e-12)


class Recorded:
    """A task whose features are its parameters, and which remembers the buffers of each
    evaluation."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def eval(self, params: Any, buffers: Any, x: Any) -> Output:
        self.calls.append(buffers)
        return Output(params["w"], params["w"], buffers)


def penalty(
    moon: MOON, z: torch.Tensor, received: Any, previous: Any, task: Any = None
) -> torch.Tensor:
    batch = Batch(torch.zeros(len(z), 1), torch.zeros(len(z)))
    buffers: list[Any] = [{"of": "received"}, {"of": "previous"}]
    client = Client(
        task or Recorded(), received, buffers[0], 1, memory={"w": previous, "buffers": buffers[1]}
    )
    found = moon.penalty({}, Output(z, z, {}), batch, client)
    assert found is not None
    return found


def test_both_old_models_run_in_eval_mode_with_their_own_buffers_and_without_gradient() -> None:
    task, ones = Recorded(), torch.ones(3, 2)
    old = [(ones * factor).requires_grad_() for factor in (2.0, -3.0)]
    value = penalty(MOON(), ones.clone().requires_grad_(), {"w": old[0]}, {"w": old[1]}, task)
    assert task.calls == [{"of": "received"}, {"of": "previous"}]
    value.backward()
    assert all(w.grad is None for w in old)
    assert value.item() == pytest.approx(
        np.log1p(np.exp(-2 / 0.5)), rel=1e-6
    )  # cosines 1 and -1, tau = 0.5


def test_the_memory_is_the_client_s_model_with_its_buffers(engine: str) -> None:
    ran = hand.run("moon", engine=engine, network=hand.with_norm(), rounds=1)
    for k, w_k in enumerate(ran.local(0)):
        hand.same(hand.row(ran.memory("moon")["w"], k), w_k)
        buffers = hand.row(ran.exchanges[0][1].buffers, k)
        hand.same(hand.row(ran.memory("moon")["buffers"], k), hand.arrays(buffers))
