"""FedProx (Li et al. 2020) against arithmetic by hand."""

from __future__ import annotations

import pytest

from tests.methods import by_hand as hand

MU = 0.7


@pytest.mark.parametrize(
    "options",
    [{"epochs": 3}, {"rounds": 3, "cohort": 2, "batch_size": 1, "momentum": 0.5}],
    ids=["full", "ones"],
)
def test_the_gradient_has_the_proximal_term(engine: str, options: dict[str, float]) -> None:
    """Eq. 2: h_k(w; w_t) = F_k(w) + mu/2 ||w - w_t||^2, so v <- rho v + g + mu (w - w_t)."""

    def local(w_t: hand.Tree, k: int, batches: list[hand.Array]) -> hand.Tree:
        def direction(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
            return hand.each(lambda g, w, w_t: g + MU * (w - w_t), hand.gradient(w, x, y), w, w_t)

        return hand.descend(w_t, batches, direction, momentum=options.get("momentum", 0.0))

    ran = hand.run("fedprox", {"fedprox": {"mu": MU}}, engine=engine, **options)
    hand.same(ran.outcome.params, ran.federated(local))


def test_the_loss_that_is_reported_has_no_proximal_term(engine: str) -> None:
    ran = hand.run("fedprox", {"fedprox": {"mu": MU}}, engine=engine)

    def loss(w: hand.Tree, w_t: hand.Tree, k: int, batch: hand.Array) -> tuple[float, hand.Tree]:
        x, y = hand.X[batch], hand.Y[batch]
        g = hand.each(lambda g, w, w_t: g + MU * (w - w_t), hand.gradient(w, x, y), w, w_t)
        return hand.loss(w, x, y), g

    ran.follows(loss)
