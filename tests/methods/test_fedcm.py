"""FedCM (Xu et al. 2021) against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.methods import by_hand as hand
from tests.methods import test_fednlr as fednlr

ALPHA, ETA_G = 0.3, 0.8


class Reference:
    """Client and server. `rates`: of a client's rows, by the received model."""

    def __init__(self, decay: float = 0.0, rates: Any = None) -> None:
        self.w, self.delta = hand.W0, hand.zeros()
        self.decay, self.rates = decay, rates or (lambda w, k: hand.each(np.ones_like, w))

    def local(self, k: int, batches: Sequence[hand.Array]) -> hand.Tree:
        """x <- x - eta_l (alpha g + (1 - alpha) Delta)."""
        w, rates = self.w, self.rates(self.w, k)
        for batch in batches:
            g = self.gradient(w, hand.X[batch], hand.Y[batch])
            g = hand.each(lambda g, w: g + self.decay * w, g, w)
            v = hand.each(lambda g, d: ALPHA * g + (1 - ALPHA) * d, g, self.delta)
            w = hand.each(lambda w, v, rate: w - hand.LR * rate * v, w, v, rates)
        return w

    def gradient(self, w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
        return hand.gradient(w, x, y)

    def round(self, cohort: Sequence[int], batches: Sequence[list[hand.Array]]) -> None:
        local = [self.local(k, of) for k, of in zip(cohort, batches, strict=True)]
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
    [{"rounds": 3}, {"rounds": 4, "cohort": 2, "batch_size": 1}, {"weight_decay": 0.1}],
    ids=["full", "ones", "decay"],
)
def test_its_lines(engine: str, options: dict[str, Any]) -> None:
    """Everybody with full batches; two of three with batches of 1: 2, 4, 6 steps, where a client's
    way counts per step; and weight decay, part of g."""
    ran = hand.run("fedcm", SETTINGS, engine=engine, **options)
    reference = Reference(options.get("weight_decay", 0.0))
    for t, cohort, batches in ran.rounds():
        hand.same(ran.exchanges[t - 1][0].shared["fedcm"]["Delta"], reference.delta)
        reference.round(cohort, batches)
    hand.same(ran.outcome.params, reference.w)
    hand.same(ran.state("fedcm")["Delta"], reference.delta)


def test_fednlr_scales_the_whole_step(engine: str) -> None:
    """x <- x - eta_l q (alpha g + (1 - alpha) Delta), row by row."""
    settings = SETTINGS | {"fednlr": {"mu0": fednlr.MU0, "a1": fednlr.A1, "a2": fednlr.A2}}
    ran = hand.run("fedcm+fednlr", settings, engine=engine, rounds=3)
    reference = Reference(rates=lambda w, k: fednlr.factors(w, hand.X[hand.CLIENTS[k]]))
    ran.replay(reference)
    hand.same(ran.outcome.params, reference.w)
    hand.same(ran.state("fedcm")["Delta"], reference.delta)


def test_a_refinement_leaves_delta_alone() -> None:
    refined = hand.run("fedcm+fnr", SETTINGS | {"fnr": {"p": 1.0, "epochs": 1}}, rounds=1)
    plain = hand.run("fedcm", SETTINGS, rounds=1)
    assert not hand.identical(refined, plain)
    hand.same(refined.state("fedcm")["Delta"], hand.arrays(plain.state("fedcm")["Delta"]))
