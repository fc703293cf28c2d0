"""FedRS (Li and Zhan 2021) against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.methods import by_hand as hand

ALPHA = 0.3
# Labels of the clients: 0; 1, 0; 1, 1, 0.
SCALES = {
    "hard": np.array([[1.0, ALPHA], [1.0, 1.0], [1.0, 1.0]]),
    "soft": np.array([[1.0, ALPHA], [1.0, 1.0], [ALPHA + (1 - ALPHA) / 2, 1.0]]),
}


def local(w: hand.Tree, s: hand.Array, batches: list[hand.Array], head: float = 1.0) -> hand.Tree:
    """Steps on the mean cross-entropy of o_c = s_c w_c h + b_c; `head`: 0 where it is frozen."""

    def direction(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
        h = hand.hidden(w, x)
        o = s * (h @ w["fc2.weight"].T) + w["fc2.bias"]
        do = (hand.softmax(o) - np.eye(2)[y]) / len(y)
        grads = hand.backward(w, x, do * s)  # dL / d(w_c h)
        return grads | {
            "fc2.weight": head * grads["fc2.weight"],
            "fc2.bias": head * do.sum(0),  # not scaled
        }

    return hand.descend(w, batches, direction)


@pytest.mark.parametrize(
    "options", [{}, {"rounds": 3, "cohort": 2, "batch_size": 1}], ids=["full", "ones"]
)
@pytest.mark.parametrize(
    ("recipe", "form"), [("fedrs", "hard"), ("fedrs", "soft"), ("fedbabu+fedrs", "hard")]
)
def test_the_scores_of_missing_classes_are_scaled(
    engine: str, recipe: str, form: str, options: dict[str, Any]
) -> None:
    """Full batches; and batches of 1, each of which lacks a class, but only client 0 lacks one.

    FedBABU's classifier is not among the trained parameters.
    """
    settings = {"fedrs": {"form": form, "alpha": ALPHA}}
    ran = hand.run(recipe, settings, engine=engine, **options)
    head = float(recipe == "fedrs")
    wanted = ran.federated(lambda w, k, batches: local(w, SCALES[form][k], batches, head))
    hand.same(ran.outcome.params, wanted)
