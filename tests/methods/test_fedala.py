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
    names = HEAD if layers else tuple(hand.W0)
    rounds = iter(t for t, cohort, _ in ran.rounds() for _ in cohort)
    COUNTS.clear()

    def local(model: hand.Tree, kept: Any, k: int, batches: list[hand.Array]) -> Any:
        theta, mix, met = kept
        t, start = next(rounds), model
        if theta is not None:
            passes = 8 if t <= 3 and met == 1 else 1
            mix = learned(model, theta, mix, k, passes, threshold)
            start = mixed(model, theta, mix)
        end = hand.descend(start, batches)
        return end, (end, mix, met + 1)

    ones = {name: np.ones_like(hand.W0[name]) for name in names}
    model, kept = ran.kept(local, (None, ones, 0))
    hand.same(ran.outcome.params, model)
    assert max(COUNTS) > 1 and min(COUNTS) == 1
    assert any(1 < count < 8 for count in COUNTS), "the losses are flat before the last pass"
    for k, (_, mix, _) in enumerate(kept):
        hand.same(hand.row(ran.memory("fedala")["W"], k), mix, rtol=1e-8)
    ran.tests([model if of is None else mixed(model, of, mix) for of, mix, _ in kept], 1e-8)


def test_a_part_of_the_samples_is_drawn_anew(engine: str) -> None:
    """rate = 1/2: W differs from that of all samples, and from round to round."""
    found = []
    for rate in (0.5, 1.0):
        ran = federation.simulation(
            "fedala", {"fedala": {"rate": rate}}, engine=engine, cohort=6, dtype=torch.float64
        )
        found.append(ran.run().personal["params"]["fc2.weight"])
    assert not torch.allclose(*found)
