"""FedALA (Zhang et al. 2023) against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests import federation
from tests.methods import by_hand as hand

HEAD = ("fc2.weight", "fc2.bias")
ALL: dict[str, Any] = {"rate": 1.0}  # every sample, so that nothing is drawn


def mixed(w: hand.Tree, theta: hand.Tree, mix: hand.Tree) -> hand.Tree:
    """Theta_hat."""
    return w | {name: theta[name] + (w[name] - theta[name]) * of for name, of in mix.items()}


def learned(
    w: hand.Tree, theta: hand.Tree, mix: hand.Tree, k: int, passes: int, threshold: float
) -> hand.Tree:
    """W after full-batch steps; the passes of the start phase end where the losses are flat."""
    x, y = hand.X[hand.CLIENTS[k]], hand.Y[hand.CLIENTS[k]]
    losses: list[float] = []
    for _ in range(passes):
        model = mixed(w, theta, mix)
        losses.append(hand.loss(model, x, y))
        g = hand.gradient(model, x, y)
        mix = {
            name: np.clip(of - 1.0 * g[name] * (w[name] - theta[name]), 0, 1)
            for name, of in mix.items()
        }
        if len(losses) > 3 and np.std(losses[-3:]) < threshold:
            break
    COUNTS.append(len(losses))
    return mix


COUNTS: list[int] = []


@pytest.mark.parametrize(("layers", "threshold"), [(1, 2e-3), (0, 2e-2)])
def test_four_rounds(engine: str, layers: int, threshold: float) -> None:
    """Two of three clients a round, the start phase in rounds up to 3."""
    options = {"layers": layers, "num_pre_loss": 3, "threshold": threshold, "max_passes": 8}
    settings = {"fedala": ALL | options | {"start_rounds": 3}}
    ran = hand.run("fedala", settings, engine=engine, rounds=4, cohort=2)
    model, names = hand.W0, HEAD if layers else tuple(hand.W0)
    own: list[hand.Tree | None] = [None] * 3
    mixes = [{name: np.ones_like(hand.W0[name]) for name in names}] * 3
    met = [0] * 3
    COUNTS.clear()
    for t, cohort, batches in ran.rounds():
        ends = []
        for k, of in zip(cohort, batches, strict=True):
            start, theta = model, own[k]
            if theta is not None:
                passes = 8 if t <= 3 and met[k] == 1 else 1
                mixes[k] = learned(model, theta, mixes[k], k, passes, threshold)
                start = mixed(model, theta, mixes[k])
            own[k] = hand.descend(start, of)
            ends.append(own[k])
            met[k] += 1
        model = hand.average(hand.shares(cohort), ends)
    hand.same(ran.outcome.params, model)
    assert max(COUNTS) > 1 and min(COUNTS) == 1
    assert any(1 < count < 8 for count in COUNTS), "the losses are flat before the last pass"
    for k in range(3):
        hand.same(hand.row(ran.memory("fedala")["W"], k), mixes[k], rtol=1e-8)
        theta = own[k]
        tested = model if theta is None else mixed(model, theta, mixes[k])
        hand.same(hand.row(ran.outcome.personal["params"], k), tested, rtol=1e-8)


def test_with_weights_that_stay_1_it_is_fedavg(engine: str) -> None:
    """eta = 0: the global model, its traffic, and every client is tested with it, up to rounding:
    Theta_k + (Theta - Theta_k)."""
    ran = hand.run("fedala", {"fedala": {"eta": 0.0}}, engine=engine, rounds=3)
    plain = hand.run("fedavg", engine=engine, rounds=3)
    hand.same(ran.outcome.params, hand.arrays(plain.outcome.params))
    for k in range(3):
        own = hand.row(ran.outcome.personal["params"], k)
        hand.same(own, hand.arrays(plain.outcome.params))
    assert [row["bytes_up"] for row in ran.outcome.rows] == [
        row["bytes_up"] for row in plain.outcome.rows
    ]


def test_a_part_of_the_samples_is_drawn_anew(engine: str) -> None:
    """rate = 1/2: W differs from that of all samples, and from round to round."""
    found = []
    for rate in (0.5, 1.0):
        ran = federation.simulation(
            "fedala", {"fedala": {"rate": rate}}, engine=engine, cohort=6, dtype=torch.float64
        )
        found.append(ran.run().personal["params"]["fc2.weight"])
    assert not torch.allclose(*found)


@pytest.mark.parametrize("other", ["scaffold", "fednova", "feddyn", "feddc", "fedcm"])
def test_a_drift_from_the_received_model_is_refused(other: str) -> None:
    with pytest.raises(Exception, match="starts local training elsewhere"):
        federation.simulation(f"fedala+{other}")
