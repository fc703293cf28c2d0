"""FedAvg (McMahan et al. 2017; FedNNNN's algorithms 1 and 2), the empty recipe, against arithmetic
by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

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


def test_two_rounds_of_all_clients_weighted_by_their_samples(engine: str) -> None:
    """Algorithm 2, line 4: w <- w - eta grad; algorithm 1, line 9: w_{t+1} = sum_k n_k/n w_k."""
    ran = hand.run("fedavg", engine=engine)
    w = hand.W0
    for t in range(2):
        local = [hand.descend(w, [client] * 2) for client in hand.CLIENTS]
        moved = [hand.length(hand.each(np.subtract, w_k, w)) for w_k in local]
        after = hand.average(np.array(hand.SIZES) / 6, local)
        row = ran.outcome.rows[t]
        e = np.average(moved, weights=hand.SIZES)
        assert row["update_norm_client"] == pytest.approx(e, rel=1e-12)
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


STEPS = [  # options of local training, and the sizes of everybody's batches in a round
    ({"cohort": 2, "rounds": 3}, [[1] * 2, [2] * 2, [3] * 2]),
    ({"batch_size": 2}, [[1, 1], [2, 2], [2, 1, 2, 1]]),  # the last short one counts
    ({"momentum": 0.9, "weight_decay": 0.1, "epochs": 3}, [[1] * 3, [2] * 3, [3] * 3]),
    ({"batch_size": 2, "local_steps": 5, "drop_last": True}, [[1] * 5, [2] * 5, [2] * 5]),
]


@pytest.mark.parametrize(("options", "sizes"), STEPS, ids=str)
def test_local_training(engine: str, options: dict[str, Any], sizes: list[list[int]]) -> None:
    """g <- g + decay w; v <- rho v + g; w <- w - eta v, with v = 0 at the start of each round. n is
    the number of samples of the cohort, not of everybody."""
    rho, decay = options.get("momentum", 0.0), options.get("weight_decay", 0.0)

    def local(w: hand.Tree, k: int, batches: list[hand.Array]) -> hand.Tree:
        assert [len(batch) for batch in batches] == sizes[k]
        return hand.descend(w, batches, momentum=rho, decay=decay)

    ran = hand.run("fedavg", engine=engine, **options)
    hand.same(ran.outcome.params, ran.federated(local))
    for ask, reply in ran.exchanges:
        assert reply.steps.tolist() == [len(sizes[k]) for k in ask.to]
