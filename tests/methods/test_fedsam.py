"""FedSAM (Qu et al. 2022) against arithmetic by hand, and the place of its point in a step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.methods import by_hand as hand
from tests.methods.test_feddecorr import decorrelation

RHO = 0.3
SETTINGS: dict[str, dict[str, object]] = {"fedsam": {"rho": RHO}}


def to_length(rho: float, tree: hand.Tree) -> hand.Tree:
    """rho tree / ||tree||, with the 1e-7 of the code."""
    return hand.each(lambda leaf: rho * leaf / (hand.length(tree) + 1e-7), tree)


def sharp(w: hand.Tree, x: hand.Array, y: hand.Array, gradient: Any = hand.gradient) -> hand.Tree:
    """The gradient at w + rho g / ||g||."""
    found: hand.Tree = gradient(hand.each(np.add, w, to_length(RHO, gradient(w, x, y))), x, y)
    return found


UNIFORM = (1, 1, 1)


@pytest.mark.parametrize(
    "options",
    [{"rounds": 3}, {"rounds": 4, "cohort": 2, "batch_size": 1}, {"momentum": 0.6}],
    ids=["full", "ones", "momentum"],
)
def test_its_steps(engine: str, options: dict[str, Any]) -> None:
    """Plain, with 2, 4 and 6 steps, and under momentum, whose v is of the gradients at the
    points."""
    ran = hand.run("fedsam", SETTINGS, engine=engine, **options)

    def local(w: hand.Tree, k: int, batches: list[hand.Array]) -> hand.Tree:
        return hand.descend(w, batches, sharp, momentum=options.get("momentum", 0.0))

    hand.same(ran.outcome.params, ran.federated(local, UNIFORM))


def test_a_term_of_the_loss_is_taken_at_the_point_and_seen_on_the_way(engine: str) -> None:
    """FedDecorr's, in both gradients."""
    beta = 0.4
    settings = SETTINGS | {"feddecorr": {"beta": beta}}
    ran = hand.run("feddecorr+fedsam", settings, engine=engine)

    def whole(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
        return hand.gradient(w, x, y, dh=beta * decorrelation(hand.hidden(w, x))[1])

    def local(w: hand.Tree, k: int, batches: list[hand.Array]) -> hand.Tree:
        return hand.descend(w, batches, lambda w, x, y: sharp(w, x, y, whole))

    hand.same(ran.outcome.params, ran.federated(local, UNIFORM), rtol=1e-9)


def test_a_term_of_the_gradient_is_taken_at_w_and_not_seen(engine: str) -> None:
    """FedProx's, and weight decay."""
    mu, decay = 0.2, 0.1
    settings = SETTINGS | {"fedprox": {"mu": mu}}
    ran = hand.run("fedprox+fedsam", settings, engine=engine, weight_decay=decay)

    def local(w_t: hand.Tree, k: int, batches: list[hand.Array]) -> hand.Tree:
        def direction(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
            g = sharp(w, x, y)
            return hand.each(lambda g, w, w_t: g + mu * (w - w_t) + decay * w, g, w, w_t)

        return hand.descend(w_t, batches, direction)

    hand.same(ran.outcome.params, ran.federated(local, UNIFORM))
