"""q-FedAvg (Li et al. 2020), algorithm 2, against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests.methods import by_hand as hand
from tests.methods import test_ccn as ccn


def one_round(
    w: hand.Tree,
    q: float,
    cohort: Sequence[int],
    batches: Sequence[list[hand.Array]],
    c: Sequence[float] | None = None,
) -> hand.Tree:
    """Lines 5-8 for the clients of a cohort, with weights `c` in both sums."""
    big_l = 1 / hand.LR
    deltas, hs = [], []
    for k, of in zip(cohort, batches, strict=True):
        client = hand.CLIENTS[k]
        f = hand.loss(w, hand.X[client], hand.Y[client]) + 1e-10
        dw = hand.each(lambda w, w_k: big_l * (w - w_k), w, hand.descend(w, of))
        deltas.append(hand.each(lambda leaf, f=f: f**q * leaf, dw))
        hs.append(q * f ** (q - 1) * hand.length(dw) ** 2 + big_l * f**q)
    c = c or [1.0] * len(cohort)
    total = hand.average(c, deltas)
    return hand.each(lambda w, d: w - d / np.dot(c, hs), w, total)


OPTIONS: list[dict[str, int]] = [
    {"rounds": 3},
    {"rounds": 3, "cohort": 2, "batch_size": 2},  # F_k is over all local data
    {"rounds": 1, "cohort": 1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("q", [0.0, 1e-4, 1.0, 2.5])
def test_its_lines(engine: str, q: float, options: dict[str, int]) -> None:
    ran = hand.run("qfedavg", {"qfedavg": {"q": q}}, engine=engine, **options)
    w = hand.W0
    for t, cohort, batches in ran.rounds():
        found = ran.exchanges[t - 1][1].upload["qfedavg"]["F"]
        wanted = [hand.loss(w, hand.X[hand.CLIENTS[k]], hand.Y[hand.CLIENTS[k]]) for k in cohort]
        np.testing.assert_allclose(found, wanted, rtol=1e-10)
        w = one_round(w, q, cohort, batches)
    hand.same(ran.outcome.params, w)


def test_the_clients_weights_are_in_both_sums(engine: str) -> None:
    """With CCN, c_r = Lambda_r / sum Lambda, since nu_r = 1/m; Lambda = 1 - softmax(sum of cosines
    / T)."""
    ran = hand.run("ccn+qfedavg", {"ccn": {"T": 0.2}}, engine=engine, rounds=1)
    local = [hand.descend(hand.W0, [client] * 2) for client in hand.CLIENTS]
    c = ccn.weights(ccn.means(local), np.full(3, 1 / 3), 0.2).tolist()
    batches = [[client] * 2 for client in hand.CLIENTS]
    hand.same(ran.outcome.params, one_round(hand.W0, 1.0, (0, 1, 2), batches, c))


def test_the_loss_is_that_of_the_received_model_in_eval_mode(engine: str) -> None:
    """With a batch norm: F_k uses the buffers that came with the model, in rounds 1 and 2."""
    ran = hand.run("qfedavg", engine=engine, network=hand.with_norm())
    for ask, reply in ran.exchanges:
        head = hand.arrays(ask.params)
        for k, client in enumerate(hand.CLIENTS):
            h = hand.normalised(ask.params | ask.buffers, hand.X[client])
            o = h @ head["fc2.weight"].T + head["fc2.bias"]
            wanted = -np.log(hand.softmax(o)[range(len(client)), hand.Y[client]]).mean()
            assert reply.upload["qfedavg"]["F"][k].item() == pytest.approx(wanted, rel=1e-10)
    first, second = (ask.buffers["bn1.mean"] for ask, _ in ran.exchanges)
    assert not torch.equal(first, second)
