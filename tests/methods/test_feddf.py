"""FedDF (Lin et al. 2020), algorithm 1, against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.baselines.feddf import FedDF
from fedml_noniid.plugins.core.component import Server, Setting
from fedml_noniid.plugins.core.data import Samples
from fedml_noniid.plugins.core.options import RecipeError
from fedml_noniid.plugins.core.randomness import fold, identity, uniform
from fedml_noniid.plugins.core.trees import add
from fedml_noniid.plugins.data.streams import key
from fedml_noniid.plugins.recipes import build
from tests import federation
from tests.methods import by_hand as hand

SETTING = Setting(3, 3, n_public=4)


def server_key(t: int) -> torch.Tensor:
    """FedDF's own in round t."""
    return fold(torch.tensor(key(0, "server", t)), identity(FedDF()))


def kl_gradient(w: hand.Tree, x: hand.Array, target: hand.Array, tau: float) -> hand.Tree:
    """Of mean_B KL(target || softmax(o / tau)): dKL/do = (softmax(o / tau) - target) / (tau B),
    then back by hand."""
    h = hand.hidden(w, x)
    do = (hand.softmax(hand.logits(w, x) / tau) - target) / (tau * len(x))
    dz = (do @ w["fc2.weight"]) * (h > 0)
    return {
        "fc1.weight": dz.T @ x,
        "fc1.bias": dz.sum(0),
        "fc2.weight": do.T @ h,
        "fc2.bias": do.sum(0),
    }


def kl(w: hand.Tree, x: hand.Array, target: hand.Array, tau: float) -> float:
    return float((target * np.log(target / hand.softmax(hand.logits(w, x) / tau))).sum(1).mean())


def teach(local: list[hand.Tree], tau: float) -> hand.Array:
    """softmax(mean_k o_k / tau), on the public split."""
    return hand.softmax(np.mean([hand.logits(w, hand.PUBLIC_X) for w in local], axis=0) / tau)


def distil(
    w: hand.Tree,
    target: hand.Array,
    t: int,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    tau: float,
    clip: float,
) -> hand.Tree:
    """Adam (0.9, 0.999, 1e-8) along a cosine, on batches of the round's own order."""
    at = fold(server_key(t), "order")
    m, v = hand.zeros(), hand.zeros()
    batches: list[hand.Array] = []
    for epoch in range(steps):
        order = np.argsort(uniform(fold(at, epoch), 4).numpy(), kind="stable")
        batches += np.split(order, range(batch_size, 4, batch_size))
    for s, batch in enumerate(batches[:steps]):
        g = kl_gradient(w, hand.PUBLIC_X[batch], target[batch], tau)
        factor = min(1.0, clip / (hand.length(g) + 1e-6))
        g = hand.each(lambda g, factor=factor: factor * g, g)
        m = hand.each(lambda m, g: 0.9 * m + 0.1 * g, m, g)
        v = hand.each(lambda v, g: 0.999 * v + 0.001 * g**2, v, g)
        eta = lr * 0.5 * (1 + np.cos(np.pi * s / steps))
        c1, c2 = 1 - 0.9 ** (s + 1), 1 - 0.999 ** (s + 1)
        w = hand.each(
            lambda w, m, v, eta=eta, c1=c1, c2=c2: w - eta * m / c1 / (np.sqrt(v / c2) + 1e-8),
            w,
            m,
            v,
        )
    return w


def test_the_gradient_by_hand_is_the_derivative() -> None:
    target, step = teach([hand.W0, hand.each(lambda w: 1.5 * w, hand.W0)], 2.0), 1e-6
    g = kl_gradient(hand.W0, hand.PUBLIC_X, target, 2.0)
    for name, leaf in hand.W0.items():
        for place in np.ndindex(leaf.shape):
            moved = [{key: value.copy() for key, value in hand.W0.items()} for _ in range(2)]
            moved[0][name][place] += step
            moved[1][name][place] -= step
            up, down = (kl(w, hand.PUBLIC_X, target, 2.0) for w in moved)
            assert (up - down) / (2 * step) == pytest.approx(g[name][place], abs=1e-8)


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize(
    ("tau", "clip", "batch_size"), [(1.0, 5.0, 128), (2.0, 5.0, 3), (1.0, 0.02, 2)]
)
def test_two_rounds(engine: str, steps: int, tau: float, clip: float, batch_size: int) -> None:
    """Average with n_k / n, then distil the uniform mean of the logits; batches of 3 are of 3 and 1
    samples."""
    numbers: dict[str, Any] = {"steps": steps, "batch_size": batch_size, "clip": clip}
    ran = hand.run("feddf", {"feddf": numbers | {"server_lr": 0.05, "T": tau}}, engine=engine)
    w = hand.W0
    for t in (1, 2):
        local = [hand.descend(w, [client] * 2) for client in hand.CLIENTS]
        w = distil(
            hand.average(np.array(hand.SIZES) / 6, local),
            teach(local, tau),
            t,
            lr=0.05,
            tau=tau,
            **numbers,
        )
    hand.same(ran.outcome.params, w, rtol=1e-8)
    hand.same(ran.outcome.evaluated, w, rtol=1e-8)


def test_partial_participation_has_the_cohort_as_teachers(engine: str) -> None:
    ran = hand.run("feddf", {"feddf": {"steps": 3, "server_lr": 0.05}}, engine=engine, cohort=2)
    for t, (ask, reply) in enumerate(ran.exchanges, start=1):
        start = {name: leaf.numpy() for name, leaf in ask.params.items()}
        local = [hand.descend(start, [hand.CLIENTS[k]] * 2) for k in ask.to]
        n = np.array([hand.SIZES[k] for k in ask.to])
        w = hand.average(n / n.sum(), local)
        w = distil(w, teach(local, 1.0), t, steps=3, batch_size=128, lr=0.05, tau=1.0, clip=5.0)
        sent = ran.exchanges[t][0].params if t < 2 else ran.outcome.params
        hand.same(sent, w, rtol=1e-8)
        assert reply.upload["feddf"] == {}, "no traffic beside the model"


def test_no_steps_are_fedavg_to_the_bit(engine: str) -> None:
    for batch_norm in (False, True):
        ran = federation.run("feddf", {"feddf": {"steps": 0}}, engine=engine, batch_norm=batch_norm)
        assert federation.equal_models(
            ran, federation.run("fedavg", engine=engine, batch_norm=batch_norm)
        )


def test_more_steps_bring_the_student_closer_to_its_teachers() -> None:
    def distance(steps: int) -> float:
        ran = hand.run("feddf", {"feddf": {"steps": steps, "server_lr": 0.02}}, rounds=1, lr=2.0)
        local = [hand.descend(hand.W0, [client] * 2, lr=2.0) for client in hand.CLIENTS]
        w = {name: leaf.numpy() for name, leaf in ran.outcome.params.items()}
        return kl(w, hand.PUBLIC_X, teach(local, 1.0), 1.0)

    assert distance(100) < 0.5 * distance(10) < 0.5 * distance(0)


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


def test_teachers_answer_with_their_own_running_statistics() -> None:
    """In eval mode, each with its own; a public split above the size of a pass is answered in
    parts."""
    simulation = federation.simulation("fedavg", dtype=torch.float64, batch_norm=True, rounds=1)
    task, exchanges = simulation.engine.clients.task, hand.tapped(simulation)
    simulation.run()
    ((ask, reply),) = exchanges
    x = torch.randn(1203, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    split = Samples(x, torch.zeros(1203, dtype=torch.int64))
    found = FedDF.mean_logits(
        Server(task, {}, {}, 1, 4, public=split, start=ask.params, replies=reply)
    ).numpy()
    models = add(ask.params, reply.deltas), reply.buffers
    wanted = np.zeros((1203, 3))
    for k in range(4):
        w, b = ({name: leaf[k].numpy() for name, leaf in tree.items()} for tree in models)
        z = x.numpy() @ w["fc1.weight"].T + w["fc1.bias"]
        z = (z - b["bn1.mean"]) / np.sqrt(b["bn1.var"] + 1e-5) * w["bn1.weight"] + w["bn1.bias"]
        wanted += (np.maximum(z, 0) @ w["fc2.weight"].T + w["fc2.bias"]) / 4
    np.testing.assert_allclose(found, wanted, rtol=1e-9)


def test_a_public_split_is_needed_and_other_distillation_refused() -> None:
    with pytest.raises(RecipeError, match="feddf: needs a public split"):
        build("feddf", {}, SETTING._replace(n_public=0))
    with pytest.raises(RecipeError, match="distillation on the server"):
        build("feddf+fedftg", {}, SETTING)
