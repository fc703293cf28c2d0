"""FedDF (Lin et al. 2020), algorithm 1, against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.core.randomness import fold, identity, uniform
from fedml_noniid.data.streams import key
from fedml_noniid.plugins.baselines.feddf import FedDF
from tests import federation
from tests.methods import by_hand as hand


def server_key(t: int) -> torch.Tensor:
    """FedDF's own in round t."""
    return fold(torch.tensor(key(0, "server", t)), identity(FedDF()))


def kl_gradient(w: hand.Tree, x: hand.Array, target: hand.Array, tau: float) -> hand.Tree:
    """Of mean_B KL(target || softmax(o / tau)): dKL/do = (softmax(o / tau) - target) / (tau B)."""
    do = (hand.softmax(hand.logits(w, x) / tau) - target) / (tau * len(x))
    return hand.backward(w, x, do)


def teach(local: list[hand.Tree], tau: float) -> hand.Array:
    """softmax(mean_k o_k / tau), on the public split."""
    return hand.softmax(np.mean([hand.logits(w, hand.PUBLIC_X) for w in local], axis=0) / tau)


def distil(w: hand.Tree, target: hand.Array, t: int, numbers: dict[str, Any]) -> hand.Tree:
    """Adam along a cosine, on batches of the round's own order."""
    at, optimizer = fold(server_key(t), "order"), hand.Adam(w)
    batches: list[hand.Array] = []
    for epoch in range(numbers["steps"]):
        order = np.argsort(uniform(fold(at, epoch), 4).numpy(), kind="stable")
        batches += np.split(order, range(numbers["batch_size"], 4, numbers["batch_size"]))
    for s, batch in enumerate(batches[: numbers["steps"]]):
        g = kl_gradient(w, hand.PUBLIC_X[batch], target[batch], numbers["T"])
        factor = min(1.0, numbers["clip"] / (hand.length(g) + 1e-6))
        g = hand.each(lambda g, factor=factor: factor * g, g)
        w = optimizer.step(
            w, g, numbers["server_lr"] * (1 + np.cos(np.pi * s / numbers["steps"])) / 2
        )
    return w


@pytest.mark.parametrize("cohort", [2, 3])
@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize(
    ("tau", "clip", "batch_size"), [(1.0, 5.0, 128), (2.0, 5.0, 3), (1.0, 0.02, 2)]
)
def test_two_rounds(
    engine: str, steps: int, tau: float, clip: float, batch_size: int, cohort: int
) -> None:
    """Average with n_k / n, then distil the uniform mean of the cohort's logits; batches of 3 are
    of 3 and 1 samples."""
    numbers = {"steps": steps, "batch_size": batch_size, "clip": clip, "server_lr": 0.05, "T": tau}
    ran = hand.run("feddf", {"feddf": numbers}, engine=engine, cohort=cohort)
    w = hand.W0
    for t, ids, batches in ran.rounds():
        local = [hand.descend(w, of) for of in batches]
        w = distil(hand.average(hand.shares(ids), local), teach(local, tau), t, numbers)
    hand.same(ran.outcome.params, w, rtol=1e-8)
    hand.same(ran.outcome.evaluated, w, rtol=1e-8)
    assert all(reply.upload["feddf"] == {} for _, reply in ran.exchanges), "no further traffic"


def test_the_students_running_statistics_move_to_the_public_data() -> None:
    """One step in train mode: mean <- 0.9 mean + 0.1 mean_B z, with z of the average before the
    step."""
    settings = {"feddf": {"steps": 1, "batch_size": 99}}
    ran = federation.run("feddf", settings, dtype=torch.float64, batch_norm=True, rounds=1)
    plain = federation.run("fedavg", dtype=torch.float64, batch_norm=True, rounds=1)
    x = federation.federation(torch.float64).public.x.numpy()
    w, b = (
        {name: leaf.numpy() for name, leaf in tree.items()}
        for tree in (plain.params, plain.buffers)
    )
    z = x @ w["fc1.weight"].T + w["fc1.bias"]
    np.testing.assert_allclose(
        ran.buffers["bn1.mean"], 0.9 * b["bn1.mean"] + 0.1 * z.mean(0), rtol=1e-10
    )
    np.testing.assert_allclose(
        ran.buffers["bn1.var"], 0.9 * b["bn1.var"] + 0.1 * z.var(0, ddof=1), rtol=1e-10
    )
