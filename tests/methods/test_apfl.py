"""APFL (Deng, Kamani, Mahdavi 2020) against arithmetic by hand."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
import torch

from fedml_noniid.core.component import Client
from fedml_noniid.plugins.baselines.apfl import APFL
from tests.methods import by_hand as hand


def mixed(alpha: float, v: hand.Tree, w: hand.Tree) -> hand.Tree:
    return hand.each(lambda v, w: alpha * v + (1 - alpha) * w, v, w)


def product(a: hand.Tree, b: hand.Tree) -> float:
    return float(sum((a[key] * b[key]).sum() for key in a))


@pytest.mark.parametrize("adaptive", [False, True])
def test_two_rounds(engine: str, adaptive: bool) -> None:
    """v and alpha descend the loss of the mixture with w as it is before its own step.

    The tested model mixes v with the average.
    """
    options: dict[str, Any] = {"alpha": 0.4, "adaptive": adaptive}
    ran = hand.run("apfl", {"apfl": options}, engine=engine, batch_size=2)

    def local(w: hand.Tree, kept: Any, k: int, batches: list[hand.Array]) -> Any:
        v, alpha = kept
        for batch in batches:
            g = hand.gradient(mixed(alpha, v, w), hand.X[batch], hand.Y[batch])
            slope = product(hand.each(np.subtract, v, w), g)
            v = hand.each(lambda v, g, a=alpha: v - hand.LR * a * g, v, g)
            alpha -= hand.LR * slope if adaptive else 0.0
            w = hand.descend(w, [batch])
        return w, (v, min(max(alpha, 0.0), 1.0))

    model, kept = ran.kept(local, (hand.W0, 0.4))
    hand.same(ran.outcome.params, model)
    ran.tests([mixed(alpha, v, model) for v, alpha in kept])
    if adaptive:
        found = ran.memory("apfl")["v"]["apfl.alpha"].numpy()
        np.testing.assert_allclose(found, [alpha for _, alpha in kept], rtol=1e-10)
        assert len({alpha for _, alpha in kept}) == 3, "each client has its own"


def test_alpha_beyond_an_end_has_the_gradient_of_one_inside() -> None:
    """The mixture takes it as 1; the slope <v - w, g> can bring it back."""
    v = {"w": torch.tensor([3.0, 1.0]), "apfl.alpha": torch.tensor(1.25, requires_grad=True)}
    w, unread = {"w": torch.tensor([1.0, 2.0])}, cast(Client, None)
    mixture = APFL(adaptive=True).own_model(v, w, unread).params["w"]
    assert mixture.tolist() == [3.0, 1.0]
    (mixture @ torch.tensor([10.0, 100.0])).backward()
    assert v["apfl.alpha"].grad == 10.0 * (3 - 1) + 100.0 * (1 - 2)
