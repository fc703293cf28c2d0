"""FedProx (Li et al. 2020) against arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plugins.core.component import RecipeError
from tests.methods import by_hand as hand

MU = 0.7


def test_two_rounds_with_the_gradient_of_the_proximal_term(engine: str) -> None:
    """Eq. 2: h_k(w; w_t) = F_k(w) + mu/2 ||w - w_t||^2, so the step is w - eta (g + mu (w - w_t))."""
    ran = hand.run("fedprox", {"fedprox": {"mu": MU}}, engine=engine, epochs=3)
    w_t = hand.W0
    for _ in range(2):

        def direction(w: hand.Tree, x: hand.Array, y: hand.Array, w_t: hand.Tree = w_t) -> hand.Tree:
            return hand.each(lambda g, w, w_t: g + MU * (w - w_t), hand.gradient(w, x, y), w, w_t)

        w_t = hand.average(np.array(hand.SIZES) / 6, [hand.descend(w_t, [c] * 3, direction) for c in hand.CLIENTS])
    hand.same(ran.outcome.params, w_t)


def test_the_first_local_step_is_fedavgs(engine: str) -> None:
    """At w = w_t the proximal term has no gradient."""
    prox = hand.run("fedprox", {"fedprox": {"mu": MU}}, engine=engine, epochs=1).outcome.params
    plain = hand.run("fedavg", engine=engine, epochs=1).outcome.params
    assert all(torch.equal(prox[key], plain[key]) for key in plain)


def test_a_strong_pull_keeps_clients_closer_to_the_received_model() -> None:
    def moved(recipe: str, **mu: object) -> float:
        return hand.run(recipe, {recipe: mu} if mu else {}, epochs=20, rounds=1).outcome.rows[0]["update_norm_client"]

    assert moved("fedprox", mu=1.0) < moved("fedprox", mu=0.1) < moved("fedavg")


def test_a_negative_mu_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"fedprox: mu = -1"):
        hand.run("fedprox", {"fedprox": {"mu": -1.0}})
