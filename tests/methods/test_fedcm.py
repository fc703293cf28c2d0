"""FedCM (Xu et al. 2021) against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.methods import by_hand as hand

ALPHA, ETA_G = 0.3, 0.8


class Reference:
    """Client and server."""

    def __init__(self, decay: float = 0.0) -> None:
        self.w, self.delta, self.decay = hand.W0, hand.zeros(), decay

    def local(self, batches: Sequence[hand.Array]) -> hand.Tree:
        """x <- x - eta_l (alpha g + (1 - alpha) Delta)."""

        def direction(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
            g = hand.each(lambda g, w: g + self.decay * w, hand.gradient(w, x, y), w)
            return hand.each(lambda g, d: ALPHA * g + (1 - ALPHA) * d, g, self.delta)

        return hand.descend(self.w, batches, direction)

    def round(self, cohort: Sequence[int], batches: Sequence[list[hand.Array]]) -> None:
        local = [self.local(of) for of in batches]
        uniform = [1 / len(local)] * len(local)
        steps = [len(of) for of in batches]
        way = [
            hand.each(lambda x, y, n=n: (x - y) / (n * hand.LR), self.w, w)
            for w, n in zip(local, steps, strict=True)
        ]
        self.delta = hand.average(uniform, way)
        mean = hand.average(uniform, local)
        self.w = hand.each(lambda x, mean: x + ETA_G * (mean - x), self.w, mean)


SETTINGS: dict[str, dict[str, object]] = {"fedcm": {"alpha": ALPHA, "server_lr": ETA_G}}


@pytest.mark.parametrize(
    "options",
    [
        {"rounds": 3},
        {"rounds": 4, "cohort": 2, "batch_size": 1},
        {"weight_decay": 0.1},
        {"epochs": 1},
    ],
    ids=["full", "ones", "decay", "one step"],
)
def test_its_lines(engine: str, options: dict[str, Any]) -> None:
    """Everybody with full batches; two of three with batches of 1: 2, 4, 6 steps, where a client's
    way counts per step; weight decay, part of g; and one step a round."""
    ran = hand.run("fedcm", SETTINGS, engine=engine, **options)
    reference = Reference(options.get("weight_decay", 0.0))
    for t, cohort, batches in ran.rounds():
        hand.same(ran.exchanges[t - 1][0].shared["fedcm"]["Delta"], reference.delta)
        reference.round(cohort, batches)
    hand.same(ran.outcome.params, reference.w)
    hand.same(ran.state("fedcm")["Delta"], reference.delta)
