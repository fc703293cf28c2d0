"""FedNSAM (Liu et al. 2026) against arithmetic by hand."""

from __future__ import annotations

import numpy as np

from tests.methods import by_hand as hand
from tests.methods.test_fedsam import to_length

GAMMA, RHO = 0.6, 0.3


def test_its_lines(engine: str) -> None:
    """Gradients at w + gamma m - rho m / ||m||; m = gamma m + the mean update; m(0) = 0."""
    settings: dict[str, dict[str, object]] = {"fednsam": {"gamma": GAMMA, "rho": RHO}}
    ran = hand.run("fednsam", settings, engine=engine, rounds=4, cohort=2, batch_size=1)
    x, m = hand.W0, hand.zeros()
    for _, _, batches in ran.rounds():
        ahead = hand.each(lambda m, e: GAMMA * m - e, m, to_length(RHO, m))

        def direction(
            w: hand.Tree, a: hand.Array, b: hand.Array, ahead: hand.Tree = ahead
        ) -> hand.Tree:
            return hand.gradient(hand.each(np.add, w, ahead), a, b)

        ends = [hand.descend(x, steps, direction) for steps in batches]
        u = hand.each(np.subtract, hand.average((0.5, 0.5), ends), x)
        m = hand.each(lambda m, u: GAMMA * m + u, m, u)
        x = hand.each(np.add, x, m)
    hand.same(ran.outcome.params, x)
    hand.same(ran.state("fednsam")["m"], m)
