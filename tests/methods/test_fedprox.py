"""FedProx (Li et al. 2020) against arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.methods import by_hand as hand

MU = 0.7


@pytest.mark.parametrize(
    "options", [{"epochs": 3}, {"rounds": 3, "cohort": 2, "batch_size": 1, "momentum": 0.5}]
)
def test_the_gradient_has_the_proximal_term(engine: str, options: dict[str, float]) -> None:
    """Eq. 2: h_k(w; w_t) = F_k(w) + mu/2 ||w - w_t||^2, so v <- rho v + g + mu (w - w_t).

    Full batches; and batches of 1, two of three clients, with momentum.
    """
    rho = options.get("momentum", 0.0)

    def local(w_t: hand.Tree, k: int, batches: list[hand.Array]) -> hand.Tree:
        w, v = w_t, hand.zeros()
        for batch in batches:
            g = hand.gradient(w, hand.X[batch], hand.Y[batch])
            v = hand.each(lambda v, g, w, w_t: rho * v + g + MU * (w - w_t), v, g, w, w_t)
            w = hand.each(lambda w, v: w - hand.LR * v, w, v)
        return w

    ran = hand.run("fedprox", {"fedprox": {"mu": MU}}, engine=engine, **options)
    hand.same(ran.outcome.params, ran.federated(local))


def test_the_loss_that_is_reported_has_no_proximal_term(engine: str) -> None:
    ran = hand.run("fedprox", {"fedprox": {"mu": MU}}, engine=engine, rounds=1, epochs=2)
    losses = []
    for client in hand.CLIENTS:
        x, y = hand.X[client], hand.Y[client]
        w = hand.descend(hand.W0, [client])
        losses.append((hand.loss(hand.W0, x, y) + hand.loss(w, x, y)) / 2)
    assert ran.outcome.rows[0]["local_loss"] == pytest.approx(np.mean(losses), rel=1e-10)
