"""FedProx (Li et al. 2020) against arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.core.options import RecipeError
from fedml_noniid.plugins.engines.cohort import draw_cohort
from tests.methods import by_hand as hand

MU = 0.7


def test_two_rounds_with_the_gradient_of_the_proximal_term(engine: str) -> None:
    """Eq. 2: h_k(w; w_t) = F_k(w) + mu/2 ||w - w_t||^2, so the step is w - eta (g + mu (w -
    w_t))."""
    ran = hand.run("fedprox", {"fedprox": {"mu": MU}}, engine=engine, epochs=3)
    w_t = hand.W0
    for _ in range(2):

        def direction(
            w: hand.Tree, x: hand.Array, y: hand.Array, w_t: hand.Tree = w_t
        ) -> hand.Tree:
            return hand.each(lambda g, w, w_t: g + MU * (w - w_t), hand.gradient(w, x, y), w, w_t)

        w_t = hand.average(
            np.array(hand.SIZES) / 6, [hand.descend(w_t, [c] * 3, direction) for c in hand.CLIENTS]
        )
    hand.same(ran.outcome.params, w_t)


def test_partial_participation_momentum_and_unequal_numbers_of_steps(engine: str) -> None:
    """Batches of 1, two of three clients; momentum takes the gradient with the term."""
    ran = hand.run(
        "fedprox",
        {"fedprox": {"mu": MU}},
        engine=engine,
        rounds=3,
        cohort=2,
        batch_size=1,
        momentum=0.5,
    )
    w_t = hand.W0
    for t in range(1, 4):
        cohort, local = draw_cohort(0, t, 3, 2), []
        for k in cohort:
            w, v = w_t, hand.zeros()
            for batch in ran.batches(k, t):
                g = hand.gradient(w, hand.X[batch], hand.Y[batch])
                v = hand.each(lambda v, g, w, w_t: 0.5 * v + g + MU * (w - w_t), v, g, w, w_t)
                w = hand.each(lambda w, v: w - hand.LR * v, w, v)
            local.append(w)
        n = np.array([hand.SIZES[k] for k in cohort])
        w_t = hand.average(n / n.sum(), local)
    hand.same(ran.outcome.params, w_t)


def test_the_loss_that_is_reported_has_no_proximal_term(engine: str) -> None:
    ran = hand.run("fedprox", {"fedprox": {"mu": MU}}, engine=engine, rounds=1, epochs=2)
    losses = []
    for client in hand.CLIENTS:
        x, y = hand.X[client], hand.Y[client]
        w = hand.descend(hand.W0, [client])
        losses.append((hand.loss(hand.W0, x, y) + hand.loss(w, x, y)) / 2)
    assert ran.outcome.rows[0]["local_loss"] == pytest.approx(np.mean(losses), rel=1e-10)


@pytest.mark.parametrize("other", ["fednova", "feddyn", "feddc"])
def test_a_second_proximal_term_is_refused(other: str) -> None:
    with pytest.raises(RecipeError, match=r"both own the proximal term"):
        hand.run(f"fedprox+{other}")


def test_the_first_local_step_is_fedavgs(engine: str) -> None:
    """At w = w_t the proximal term has no gradient."""
    prox = hand.run("fedprox", {"fedprox": {"mu": MU}}, engine=engine, epochs=1).outcome.params
    plain = hand.run("fedavg", engine=engine, epochs=1).outcome.params
    assert all(torch.equal(prox[key], plain[key]) for key in plain)


def test_a_strong_pull_keeps_clients_closer_to_the_received_model() -> None:
    def moved(recipe: str, **mu: object) -> float:
        return hand.run(recipe, {recipe: mu} if mu else {}, epochs=20, rounds=1).outcome.rows[0][
            "update_norm_client"
        ]

    assert moved("fedprox", mu=1.0) < moved("fedprox", mu=0.1) < moved("fedavg")
