"""FedAvg (McMahan et al. 2017; FedNNNN's algorithms 1 and 2), the empty recipe, against arithmetic
by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.engines.cohort import draw_cohort
from fedml_noniid.plugins.engines.federation import Federation
from fedml_noniid.plugins.engines.plan import LocalTraining, Plan
from fedml_noniid.plugins.models.networks import logistic_regression
from fedml_noniid.plugins.simulate import simulate
from tests.methods import by_hand as hand


def test_the_gradient_written_out_by_hand_is_the_derivative_of_the_loss() -> None:
    """The oracle itself, by central differences."""
    found = hand.gradient(hand.W0, hand.X, hand.Y)
    for key, leaf in hand.W0.items():
        for index in np.ndindex(leaf.shape):
            step = np.zeros_like(leaf)
            step[index] = 1e-6
            ahead, behind = ({**hand.W0, key: leaf + sign * step} for sign in (1, -1))
            slope = (hand.loss(ahead, hand.X, hand.Y) - hand.loss(behind, hand.X, hand.Y)) / 2e-6
            assert found[key][index] == pytest.approx(slope, abs=1e-8)


def test_one_step_on_a_logistic_regression_with_the_arithmetic_in_words(engine: str) -> None:
    """w = 0, so p = (1/2, 1/2).

    Client 0: x = 2, y = 0; client 1: x = 1, 1, y = 1, 0; lr = 1, one step.

    client 0: gradient by logit (-1/2, 1/2), times x = 2: W = (1, -1), b = (1/2, -1/2)
    client 1: the two samples' gradients cancel: W = 0, b = 0
    n_k/n = 1/3, 2/3: W = (1/3, -1/3), b = (1/6, -1/6)
    """
    net = logistic_regression((1,), 2)
    start = {"fc.weight": np.zeros((2, 1)), "fc.bias": np.zeros(2)}
    zero = hand.Given(net.name, net.blocks, net.head, start=start)
    data = hand.samples(np.array([[2.0], [1.0], [1.0]]), np.array([0, 1, 0]))
    simulation = simulate(
        "fedavg",
        {},
        Federation.of(data, [np.array([0]), np.array([1, 2])], data),
        Plan(zero, LocalTraining(lr=1.0, epochs=1, batch_size=2), 1, 2, 0, engine=engine),
    )
    out = simulation.run()
    np.testing.assert_allclose(out.params["fc.weight"], [[1 / 3], [-1 / 3]], rtol=1e-15)
    np.testing.assert_allclose(out.params["fc.bias"], [1 / 6, -1 / 6], rtol=1e-15)
    assert out.rows[0]["local_loss"] == pytest.approx(math.log(2))


def test_two_rounds_of_all_clients_weighted_by_their_samples(engine: str) -> None:
    """Algorithm 2, line 4: w <- w - eta grad; algorithm 1, line 9: w_{t+1} = sum_k n_k/n w_k."""
    ran = hand.run("fedavg", engine=engine)
    w = hand.W0
    for t in range(2):
        local = [hand.descend(w, [client] * 2) for client in hand.CLIENTS]
        moved = [hand.length(hand.each(np.subtract, w_k, w)) for w_k in local]
        after = hand.average(np.array(hand.SIZES) / 6, local)
        row = ran.outcome.rows[t]
        assert row["update_norm_client"] == pytest.approx(np.mean(moved), rel=1e-12)
        assert row["update_norm_server"] == pytest.approx(
            hand.length(hand.each(np.subtract, after, w)), rel=1e-12
        )
        w = after
        assert row["test_accuracy"] == hand.accuracy(w, hand.PUBLIC_X, hand.PUBLIC_Y)
        assert row["test_loss"] == pytest.approx(
            hand.loss(w, hand.PUBLIC_X, hand.PUBLIC_Y), rel=1e-12
        )
    hand.same(ran.outcome.params, w)
    assert all(torch.equal(ran.outcome.params[k], ran.outcome.evaluated[k]) for k in w)


def test_the_weights_are_those_of_the_clients_that_take_part(engine: str) -> None:
    """n is the number of samples of the cohort, not of everybody."""
    ran = hand.run("fedavg", engine=engine, cohort=2, rounds=3)
    w = hand.W0
    for t in (1, 2, 3):
        cohort = draw_cohort(0, t, 3, 2)
        n_k = np.array([hand.SIZES[k] for k in cohort])
        w = hand.average(n_k / n_k.sum(), [hand.descend(w, [hand.CLIENTS[k]] * 2) for k in cohort])
    hand.same(ran.outcome.params, w)


def test_mini_batches_keep_the_last_short_one(engine: str) -> None:
    """Batches of 2: clients take 1, 1 and 2 steps an epoch, the third client's last batch has one
    sample."""
    ran = hand.run("fedavg", engine=engine, batch_size=2)
    w = hand.W0
    for t in (1, 2):
        batches = [ran.batches(k, t) for k in range(3)]
        assert [[len(b) for b in of] for of in batches] == [[1, 1], [2, 2], [2, 1, 2, 1]]
        w = hand.average(np.array(hand.SIZES) / 6, [hand.descend(w, of) for of in batches])
    hand.same(ran.outcome.params, w)


def test_local_momentum_and_weight_decay_start_anew_in_every_round(engine: str) -> None:
    """g <- g + 0.1 w; v <- 0.9 v + g; w <- w - eta v, with v = 0 at the start of each round."""
    ran = hand.run("fedavg", engine=engine, momentum=0.9, weight_decay=0.1, epochs=3)
    w = hand.W0
    for _ in range(2):
        local = []
        for client in hand.CLIENTS:
            w_k, v = w, hand.zeros()
            for _ in range(3):
                g = hand.gradient(w_k, hand.X[client], hand.Y[client])
                v = hand.each(lambda v, g, p: 0.9 * v + g + 0.1 * p, v, g, w_k)
                w_k = hand.each(lambda p, v: p - hand.LR * v, w_k, v)
            local.append(w_k)
        w = hand.average(np.array(hand.SIZES) / 6, local)
    hand.same(ran.outcome.params, w)


def test_local_steps_in_place_of_epochs(engine: str) -> None:
    """Everybody takes E = 5 steps, whatever it holds, in batches of 2 without the short ones."""
    ran = hand.run("fedavg", engine=engine, rounds=2, batch_size=2, local_steps=5, drop_last=True)
    w = hand.W0
    for t in (1, 2):
        batches = [ran.batches(k, t) for k in range(3)]
        assert [[len(batch) for batch in of] for of in batches] == [[1] * 5, [2] * 5, [2] * 5]
        w = hand.average(np.array(hand.SIZES) / 6, [hand.descend(w, of) for of in batches])
    hand.same(ran.outcome.params, w)
    assert all(reply.steps.tolist() == [5, 5, 5] for _, reply in ran.exchanges)
