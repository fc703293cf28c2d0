"""FedAdagrad, FedAdam and FedYogi (Reddi et al. 2021), algorithm 2, against arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.methods import by_hand as hand

FORMS = ("fedadagrad", "fedadam", "fedyogi")
ETA, TAU, BETA1, BETA2 = 0.05, 0.02, 0.6, 0.8


def options(form: str) -> dict[str, dict[str, object]]:
    own: dict[str, object] = {"server_lr": ETA, "tau": TAU, "beta1": BETA1}
    return {form: own if form == "fedadagrad" else own | {"beta2": BETA2}}


def second(form: str, v: hand.Array, delta: hand.Array) -> hand.Array:
    if form == "fedadagrad":
        return v + delta**2
    if form == "fedadam":
        return BETA2 * v + (1 - BETA2) * delta**2
    return v - (1 - BETA2) * delta**2 * np.sign(v - delta**2)


@pytest.mark.parametrize("weights", ["size", "uniform"])
@pytest.mark.parametrize("form", FORMS)
def test_three_rounds(form: str, weights: str, engine: str) -> None:
    settings = {form: options(form)[form] | {"weights": weights}}
    ran = hand.run(form, settings, engine=engine, rounds=3)
    sizes = np.array(hand.SIZES, dtype=float) if weights == "size" else np.ones(3)
    w, m, v = hand.W0, hand.zeros(), hand.each(lambda leaf: leaf + TAU**2, hand.zeros())
    for _ in range(3):
        deltas = [
            hand.each(np.subtract, hand.descend(w, [client] * 2), w) for client in hand.CLIENTS
        ]
        delta = hand.average(sizes / sizes.sum(), deltas)
        m = hand.each(lambda m, d: BETA1 * m + (1 - BETA1) * d, m, delta)
        v = hand.each(lambda v, d: second(form, v, d), v, delta)
        w = hand.each(lambda w, m, v: w + ETA * m / (np.sqrt(v) + TAU), w, m, v)
    hand.same(ran.outcome.params, w)
    hand.same(ran.state(form)["v"], v)
