"""FedNNNN (Nagura et al. 2020), algorithm 3 and eqs. 4-13, against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.core.component import Reply, Server
from fedml_noniid.core.optimizers import SGD
from fedml_noniid.core.task import Task
from fedml_noniid.core.trees import Tree
from fedml_noniid.plugins.fednnnn.algorithm import FedNNNN
from tests.methods import by_hand as hand

BETA, GAMMA = 0.9, 0.6
VARIANTS = ("fednnnn", "norm_norm", "momentum")


class Reference:
    """Algorithm 3 with n_k/n = 1/m, eq. 8 and eqs. 10-11."""

    def __init__(self, beta: float, gamma: float, variant: str = "fednnnn") -> None:
        self.beta, self.gamma, self.variant = beta, gamma, variant
        self.w, self.d, self.average = hand.W0, hand.zeros(), hand.W0

    def round(self, cohort: tuple[int, ...] = (0, 1, 2)) -> tuple[float, float]:
        """(N, E)."""
        local = [hand.descend(self.w, [hand.CLIENTS[k]] * 2) for k in cohort]  # lines 5-8
        deltas = [hand.each(np.subtract, w_k, self.w) for w_k in local]  # eq. 2
        u = hand.average([1 / len(cohort)] * len(cohort), deltas)
        self.average = hand.each(np.add, self.w, u)  # step 4 of figure 5
        n = hand.length(u)  # line 9, eq. 4
        e = float(np.mean([hand.length(delta) for delta in deltas]))  # line 10, eq. 5
        by_d, by_u = {
            "fednnnn": (self.gamma, self.beta * e / n),  # line 11, eq. 12
            "norm_norm": (0, self.beta * e / n),  # eq. 8
            "momentum": (self.gamma, 1),  # eq. 10
        }[self.variant]
        self.d = hand.each(lambda d, u: by_d * d + by_u * u, self.d, u)
        self.w = hand.each(np.add, self.w, self.d)  # line 12, eqs. 8, 11, 13
        return n, e


def settings(**options: float | str) -> dict[str, dict[str, object]]:
    return {"fednnnn": {"beta": BETA, "gamma": GAMMA} | options}


@pytest.mark.parametrize("evaluate", ["average", "sent"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("cohort", [2, 3])
def test_three_rounds(engine: str, variant: str, evaluate: str, cohort: int) -> None:
    """Sent is w_t + d; evaluated is the plain average of the clients, or what is sent."""
    options: dict[str, Any] = {"engine": engine, "rounds": 3, "cohort": cohort}
    ran = hand.run("fednnnn", settings(variant=variant, evaluate=evaluate), **options)
    reference = Reference(BETA, GAMMA, variant)
    for t, ids, _ in ran.rounds():
        row, w = ran.outcome.rows[t - 1], reference.w
        hand.same(ran.exchanges[t - 1][0].params, w)
        n, e = reference.round(ids)
        assert cohort == 2 or e > 1.01 * n, "clients pull apart"
        evaluated = reference.average if evaluate == "average" else reference.w
        loss = hand.loss(evaluated, hand.PUBLIC_X, hand.PUBLIC_Y)
        assert row["test_loss"] == pytest.approx(loss, rel=1e-10)
        assert row["sent_accuracy"] == hand.accuracy(reference.w, hand.PUBLIC_X, hand.PUBLIC_Y)
        for key, value in (("N", n), ("E", e), ("ratio", e / n)):
            assert row[f"fednnnn_{key}"] == pytest.approx(value, rel=1e-10)
    hand.same(ran.outcome.params, reference.w)
    hand.same(ran.outcome.evaluated, evaluated)
    hand.same(ran.state("fednnnn")["d"], reference.d)


def tensor(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def update(*deltas: dict[str, list[float]], dtype: torch.dtype = torch.float64) -> Server:
    """What the server sees of these clients' updates at w_t = 0."""
    stacked = {
        key: torch.stack([tensor(*delta[key], dtype=dtype) for delta in deltas])
        for key in deltas[0]
    }
    m, u = len(deltas), {key: leaf.mean(0) for key, leaf in stacked.items()}
    reply = Reply(tuple(range(m)), stacked, {}, {}, torch.ones(m), torch.ones(m), torch.zeros(m))
    w, q = (
        {key: torch.zeros_like(leaf) for key, leaf in u.items()},
        torch.full((m,), 1 / m, dtype=torch.float64),
    )
    task = Task(hand.given(), SGD(0.1))
    return Server(task, w, {}, 1, m, start=w, replies=reply, trained=stacked, weights=q, update=u)


def stepped(
    method: FedNNNN, before: Tree, server: Server
) -> tuple[dict[str, torch.Tensor], Tree, Tree]:
    """(w_{t+1} - w_t, the state, what is recorded)."""
    found = method.step(replace(server, state=before))
    assert found.params is not None
    return found.params, found.state, found.metrics


def before(
    dtype: torch.dtype = torch.float64, **d: list[float]
) -> dict[str, dict[str, torch.Tensor]]:
    return {"d": {key: tensor(*value, dtype=dtype) for key, value in d.items()}}


BITS = {
    torch.float32: 2.0**-23,
    torch.float64: 2.0**-52,
}  # eps: the gap between 1 and the next number


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize(
    ("size", "off", "small"),
    [
        (1.0, 128, True),  # N = 64 eps, E = 1 - 64 eps
        (1.0, 129, False),
        (1024.0, 128 * 1020, True),  # of 64 eps E, where E is 1024 but for a hundredth
        (1024.0, 128 * 1028, False),
        (2.0**-10, 128, True),  # of 64 eps, since E < 1
        (2.0**-10, 129, False),  # clients that nearly agree late in training move on
    ],
)
def test_what_counts_as_close_to_zero(
    size: float, off: int, small: bool, dtype: torch.dtype
) -> None:
    """N <= 64 eps max(1, E); else the step has length beta E.

    Deltas size and off eps - size: all numbers are exact.
    """
    first, second = size, off * BITS[dtype] - size
    server = update({"w": [first]}, {"w": [second]}, dtype=dtype)
    assert server.update["w"].item() == off / 2 * BITS[dtype]
    d, _, _ = stepped(FedNNNN(beta=1.0, gamma=0.0), before(dtype, w=[0.0]), server)
    assert d["w"].item() == (0.0 if small else pytest.approx((first - second) / 2))
