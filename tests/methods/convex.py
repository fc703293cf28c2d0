"""Logistic regression on the samples of `by_hand` with weight decay: strongly convex, so it has one
minimiser."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from fedml_noniid.models.networks import logistic_regression
from tests.methods import by_hand as hand

DECAY = 0.2
START = {"fc.weight": np.zeros((2, 2)), "fc.bias": np.zeros(2)}


def gradient(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
    """Of the mean cross-entropy plus (decay / 2) ||w||^2."""
    do = (hand.softmax(x @ w["fc.weight"].T + w["fc.bias"]) - np.eye(2)[y]) / len(y)
    return {
        "fc.weight": do.T @ x + DECAY * w["fc.weight"],
        "fc.bias": do.sum(0) + DECAY * w["fc.bias"],
    }


@cache
def minimiser(*p: float) -> hand.Tree:
    """Of sum_k p_k f_k, by gradient descent until nothing moves."""
    w = START
    for _ in range(2000):
        grads = [gradient(w, hand.X[k], hand.Y[k]) for k in hand.CLIENTS]
        w = hand.each(lambda leaf, g: leaf - 0.5 * g, w, hand.average(p, grads))
    return w


def run(recipe: str, settings: dict[str, object], rounds: int, **options: Any) -> hand.Tree:
    """The model after `rounds` rounds of everybody, with full batches."""
    net = logistic_regression((2,), 2)
    network = hand.given(START, net=net)
    ran = hand.run(
        recipe,
        {recipe: settings} if settings else {},
        rounds=rounds,
        network=network,
        weight_decay=DECAY,
        **options,
    )
    return hand.arrays(ran.outcome.params)


def distance(a: hand.Tree, b: hand.Tree) -> float:
    return hand.length(hand.each(np.subtract, a, b))
