"""FedNNNN (Nagura et al. 2020), algorithm 3 and eqs. 4-13, against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from plugins.core.component import RecipeError, Reply, Setting, Update
from plugins.engines.simulation import LocalTraining, Schedule, Simulation, draw_cohort
from plugins.fednnnn.algorithm import FedNNNN
from plugins.models.networks import logistic_regression
from tests.methods import by_hand as hand

BETA, GAMMA = 0.9, 0.6


class Reference:
    """Algorithm 3 with n_k/n = 1/m."""

    def __init__(self, beta: float, gamma: float) -> None:
        self.beta, self.gamma = beta, gamma
        self.w, self.d, self.average = hand.W0, hand.zeros(), hand.W0

    def round(self, cohort: tuple[int, ...] = (0, 1, 2)) -> tuple[float, float]:
        """(N, E)."""
        local = [hand.descend(self.w, [hand.CLIENTS[k]] * 2) for k in cohort]  # lines 5-8
        deltas = [hand.each(np.subtract, w_k, self.w) for w_k in local]  # eq. 2
        u = hand.average([1 / len(cohort)] * len(cohort), deltas)
        n = hand.length(u)  # line 9, eq. 4: all weights as one vector
        e = float(np.mean([hand.length(d) for d in deltas]))  # line 10, eq. 5
        self.average = hand.each(np.add, self.w, u)  # step 4 of figure 5: what is evaluated
        self.d = hand.each(lambda d, u: self.gamma * d + self.beta * e / n * u, self.d, u)  # line 11, eq. 12
        self.w = hand.each(np.add, self.w, self.d)  # line 12, eq. 13: what is sent
        return n, e


def test_three_rounds_with_momentum(engine: str) -> None:
    """Sent is w_t + d, evaluated is the plain average of the clients."""
    ran = hand.run("fednnnn", {"fednnnn": {"beta": BETA, "gamma": GAMMA}}, engine=engine, rounds=3)
    reference = Reference(BETA, GAMMA)
    for t in range(3):
        sent = ran.exchanges[t][0].params
        hand.same(sent, reference.w)
        reference.round()
        found = hand.loss(reference.average, hand.PUBLIC_X, hand.PUBLIC_Y)
        assert ran.outcome.rows[t]["test_loss"] == pytest.approx(found, rel=1e-10)
    hand.same(ran.outcome.params, reference.w)
    hand.same(ran.outcome.evaluated, reference.average)
    hand.same(ran.state("fednnnn")["d"], reference.d)


def test_partial_participation(engine: str) -> None:
    ran = hand.run("fednnnn", {"fednnnn": {"beta": BETA, "gamma": GAMMA}}, engine=engine, rounds=3, cohort=2)
    reference = Reference(BETA, GAMMA)
    for t in (1, 2, 3):
        reference.round(draw_cohort(0, t, 3, 2))
    hand.same(ran.outcome.params, reference.w)
    hand.same(ran.outcome.evaluated, reference.average)


def test_without_momentum_the_server_moves_by_beta_e(engine: str) -> None:
    """Eq. 9: ||w_{t+1} - w_t|| = beta E, and N <= E (proposition 1)."""
    ran = hand.run("fednnnn", {"fednnnn": {"beta": BETA, "gamma": 0.0}}, engine=engine, rounds=3)
    reference = Reference(BETA, 0.0)
    for row in ran.outcome.rows:
        n, e = reference.round()
        assert n < e
        assert row["update_norm_client"] == pytest.approx(e, rel=1e-10)
        assert row["update_norm_server"] == pytest.approx(BETA * e, rel=1e-10)


def update(*deltas: list[float]) -> tuple[dict[str, torch.Tensor], Update]:
    """(u, what the server sees) for these clients' updates of one tensor."""
    stacked = torch.tensor(deltas, dtype=torch.float64)
    m = len(deltas)
    weights = torch.full((m,), 1 / m, dtype=torch.float64)
    reply = Reply(tuple(range(m)), {}, {}, {}, torch.ones(m), torch.ones(m), torch.zeros(m), {})
    return {"w": stacked.mean(0)}, Update(reply, {"w": stacked}, weights, {"w": stacked}, {})


def test_the_step_in_numbers() -> None:
    """Deltas (6, 0), (0, 8): u = (3, 4), N = 5, E = 7; d = 1/2 (10, 20) + 5 * 7/5 * (3, 4) = (26, 38)."""
    u, seen = update([6.0, 0.0], [0.0, 8.0])
    before = {"d": {"w": torch.tensor([10.0, 20.0], dtype=torch.float64)}}
    d, state = FedNNNN(beta=5.0, gamma=0.5).step(u, before, seen)
    torch.testing.assert_close(d["w"], torch.tensor([26.0, 38.0], dtype=torch.float64))
    assert torch.equal(state["d"]["w"], d["w"])


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
def test_when_clients_cancel_the_normalised_term_is_dropped_and_momentum_goes_on(scale: float) -> None:
    """N = 0, "return w_t as is": d = gamma d."""
    u, seen = update([scale, -2 * scale], [-scale, 2 * scale])
    before = {"d": {"w": torch.tensor([1.0, 3.0], dtype=torch.float64)}}
    d, _ = FedNNNN(beta=5.0, gamma=0.5).step(u, before, seen)
    assert d["w"].tolist() == [0.5, 1.5]
    d, _ = FedNNNN(beta=5.0, gamma=0.0).step(u, before, seen)
    assert d["w"].tolist() == [0.0, 0.0]


def test_clients_that_do_not_move_leave_the_model_where_it_is() -> None:
    """N = E = 0."""
    u, seen = update([0.0, 0.0], [0.0, 0.0])
    d, _ = FedNNNN().step(u, {"d": {"w": torch.zeros(2, dtype=torch.float64)}}, seen)
    assert d["w"].tolist() == [0.0, 0.0]


def test_clients_that_cancel_in_a_whole_run(engine: str) -> None:
    """w = 0, the same x with the two labels: gradients -+x/2, so N = 0 in every round and w stays 0."""
    net = logistic_regression((1,), 2)
    start = {"fc.weight": np.zeros((2, 1)), "fc.bias": np.zeros(2)}
    zero = hand.Given(net.name, net.blocks, net.head, start=start)
    data = hand.samples(np.array([[2.0], [2.0]]), np.array([0, 1]))
    out = Simulation(
        "fednnnn", {}, zero, data, [np.array([0]), np.array([1])], data, None, None,
        LocalTraining("sgd", 1.0, 1, 2), Schedule(3, 2, 0), engine=engine,
    ).run()  # fmt: skip
    assert out.rows[-1]["update_norm_client"] > 1
    assert all(not leaf.any() for leaf in out.params.values())


def test_one_client_with_beta_one_is_fedavg() -> None:
    """m = 1: E = N."""
    settings: dict[str, Any] = {"fednnnn": {"beta": 1.0, "gamma": 0.0}}
    ran = hand.run("fednnnn", settings, cohort=1, rounds=3)
    plain = hand.run("fedavg", cohort=1, rounds=3)
    hand.same(ran.outcome.params, {key: leaf.numpy() for key, leaf in plain.outcome.params.items()})


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"beta": 0.0}, "beta = 0"), ({"beta": -1.0}, "beta"), ({"gamma": 1.0}, "gamma = 1"), ({"gamma": -0.1}, "gamma")],
)
def test_bad_hyper_parameters_are_refused(fields: dict[str, float], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        FedNNNN(**fields).check(Setting(3, 3, 2, 2, "sgd", 0.1, 0))
