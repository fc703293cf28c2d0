"""FedProto (Tan et al. 2022) against arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.methods import by_hand as hand


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_three_rounds(engine: str, weights: str) -> None:
    """Two of three clients a round. A class that nobody of a round has keeps its prototype.

    d/dh of lambda mean_b (h - C_y)^2 summed over d / d.
    """
    lam = 0.6
    settings = {"fedproto": {"lam": lam, "weights": weights}}
    ran = hand.run("fedproto", settings, engine=engine, rounds=3, cohort=2, batch_size=2)
    models, prototypes, known = [hand.W0] * 3, np.zeros((2, 2)), np.zeros(2)

    def pulled(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
        way = known[y][:, None] * (hand.hidden(w, x) - prototypes[y])
        return hand.gradient(w, x, y, lam * 2 * way / (2 * len(y)))

    for _, cohort, batches in ran.rounds():
        sums, total = np.zeros((2, 2)), np.zeros(2)
        for k, of in zip(cohort, batches, strict=True):
            models[k] = hand.descend(models[k], of, pulled)
            x, y = hand.X[hand.CLIENTS[k]], hand.Y[hand.CLIENTS[k]]
            for c in set(y):
                weight = (y == c).sum() if weights == "size" else 1
                sums[c] += weight * hand.hidden(models[k], x[y == c]).mean(0)
                total[c] += weight
        there = total > 0
        prototypes[there] = sums[there] / total[there][:, None]
        known[there] = 1
    found = ran.state("fedproto")
    np.testing.assert_allclose(found["C"].numpy(), prototypes, rtol=1e-10)
    assert found["known"].tolist() == known.tolist()
    for k in range(3):
        hand.same(hand.row(ran.outcome.personal["params"], k), models[k])
    row = ran.outcome.rows[-1]
    tests = (hand.PUBLIC_X, hand.PUBLIC_Y)
    assert row["test_accuracy"] == np.mean([hand.accuracy(w, *tests) for w in models])
    # Each of two clients: 2 classes x 2 features and 2 numbers, of 8 bytes, each way.
    assert row["bytes_up"] == row["bytes_down"] == 2 * (4 + 2) * 8


def test_no_model_travels_and_the_result_has_the_first_one(engine: str) -> None:
    ran = hand.run("fedproto", engine=engine)
    for ask, reply in ran.exchanges:
        assert not (ask.params or ask.buffers or reply.deltas or reply.buffers)
    hand.same(ran.outcome.params, hand.W0)
    assert ran.outcome.rows[-1]["update_norm_server"] == 0.0
