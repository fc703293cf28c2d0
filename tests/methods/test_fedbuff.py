"""FedBuff (Nguyen et al. 2022) and FedAsync (Xie et al. 2019) against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import n_bytes
from fedml_noniid.engines.plan import Clock
from fedml_noniid.engines.schedule import Devices, Waits
from fedml_noniid.engines.simulation import Simulation
from tests import federation
from tests.methods import by_hand as hand

# Two steps take 10, 20 and 44 microseconds. Two answers to a step, and all train at a time:
# 20: clients 0, 1 with w_0. 40: both, with w_1. 50: client 0 with w_2, client 2 with w_0.
# 60: client 0 with w_3, client 1 with w_2.
DEVICES, WAITS = Devices((5, 10, 22), (0,) * 3, (0,) * 3), Waits(buffer=2, concurrency=3)
ANSWERS = (((0, 0), (1, 0)), ((0, 1), (1, 1)), ((0, 2), (2, 0)), ((0, 3), (1, 2)))
Step = Callable[[hand.Tree, list[tuple[hand.Tree, hand.Tree, int]]], hand.Tree]


def run(recipe: str, settings: dict[str, Any], engine: str) -> hand.Ran:
    clock = Clock(DEVICES, WAITS)
    return hand.run(recipe, settings, engine=engine, cohort=2, rounds=4, clock=clock)


def replayed(step: Step, mu: float = 0.0) -> hand.Tree:
    """The models of the steps: `step` takes w and, of each answer, (v, w_k, tau)."""
    models = [hand.W0]
    for t, answers in enumerate(ANSWERS):
        ends = []
        for client, version in answers:
            v = models[version]

            def pulled(w: hand.Tree, x: Any, y: Any, v: hand.Tree = v) -> hand.Tree:
                return hand.each(lambda g, w, v: g + mu * (w - v), hand.gradient(w, x, y), w, v)

            w_k = hand.descend(v, [hand.CLIENTS[client]] * 2, pulled)
            ends.append((v, w_k, t - version))
        models.append(step(models[-1], ends))
    return models[-1]


def buffered(lr: float, exponent: float) -> Step:
    """w + lr (1/2) sum_k (1 + tau_k)^-exponent (w_k - v_k)."""

    def step(w: hand.Tree, ends: list[tuple[hand.Tree, hand.Tree, int]]) -> hand.Tree:
        for v, w_k, tau in ends:
            factor = lr / 2 / (1 + tau) ** exponent
            w = hand.each(lambda w, end, v, f=factor: w + f * (end - v), w, w_k, v)
        return w

    return step


@pytest.mark.parametrize(("lr", "exponent"), [(1.0, 0.5), (0.7, 1.0), (1.0, 0.0)])
def test_fedbuff(engine: str, lr: float, exponent: float) -> None:
    ran = run("fedbuff", {"fedbuff": {"server_lr": lr, "exponent": exponent}}, engine)
    hand.same(ran.outcome.params, replayed(buffered(lr, exponent)))
    rows = ran.outcome.rows
    assert [row["staleness"] for row in rows] == [0, 0, 1, 0.5]
    assert [row["clock_s"] for row in rows] == [20e-6, 40e-6, 50e-6, 60e-6]
    model = n_bytes(ran.outcome.params)  # the old ones do not travel
    assert [(row["bytes_down"], row["bytes_up"]) for row in rows] == [(2 * model, 2 * model)] * 4


def test_fedasync_mixes_models(engine: str) -> None:
    """w + 0.6 (1/2) sum_k (1 + tau_k)^-0.5 (w_k - w)."""

    def step(w: hand.Tree, ends: list[tuple[hand.Tree, hand.Tree, int]]) -> hand.Tree:
        factors = [0.3 / (1 + tau) ** 0.5 for _, _, tau in ends]
        moved = [hand.each(np.subtract, w_k, w) for _, w_k, _ in ends]
        return hand.each(np.add, w, hand.average(factors, moved))

    hand.same(run("fedasync", {}, engine).outcome.params, replayed(step))


def test_one_answer_to_a_step_of_fedasync_is_the_papers_rule() -> None:
    """(1 - alpha_t) w + alpha_t w_k: 10, 20: client 0; 20: client 1 of w_0, one step behind two."""
    clock = Clock(DEVICES, Waits(buffer=1, concurrency=3))
    ran = hand.run("fedasync", {}, cohort=1, rounds=3, clock=clock)
    w, models = hand.W0, [hand.W0]
    for client, version in ((0, 0), (0, 1), (1, 0)):
        alpha = 0.6 / (len(models) - version) ** 0.5
        w_k = hand.descend(models[version], [hand.CLIENTS[client]] * 2)
        w = hand.average([1 - alpha, alpha], [w, w_k])
        models.append(w)
    hand.same(ran.outcome.params, w)


def test_fedprox_pulls_to_the_received_model(engine: str) -> None:
    ran = run("fedbuff+fedprox", {"fedprox": {"mu": 0.4}}, engine)
    hand.same(ran.outcome.params, replayed(buffered(1.0, 0.5), mu=0.4))


N = len(federation.SIZES)
UNEVEN = Devices(tuple(range(1, N + 1)), (0,) * N, (0,) * N)


def simulation(recipe: str, waits: Waits, devices: Devices = UNEVEN, **options: Any) -> Simulation:
    methods = {"fedbuff": {"weights": "size"}} if recipe.startswith("fedbuff") else {}
    return federation.simulation(recipe, methods, clock=Clock(devices, waits), **options)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_buffer_of_all_that_are_alike_is_fedavg(engine: str, batch_norm: bool) -> None:
    """To the bit."""
    alike, all_of_them = Devices((7,) * N, (0,) * N, (0,) * N), Waits(buffer=N, concurrency=N)
    how: dict[str, Any] = {"engine": engine, "cohort": N, "local_steps": 3}
    one = simulation("fedbuff", all_of_them, alike, batch_norm=batch_norm, **how).run()
    other = federation.simulation("fedavg", batch_norm=batch_norm, **how).run()
    assert federation.equal_models(one, other)


def test_a_buffer_for_a_method_of_rounds_is_refused() -> None:
    with pytest.raises(UserError, match="fedavg takes no answers of models of earlier rounds"):
        simulation("fedavg", Waits(buffer=2, concurrency=4))
