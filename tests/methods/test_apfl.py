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
    model, v, alpha = hand.W0, [hand.W0] * 3, [0.4] * 3
    for _, _, batches in ran.rounds():
        ends = []
        for k, of in enumerate(batches):
            w = model
            for batch in of:
                x, y = hand.X[batch], hand.Y[batch]
                g = hand.gradient(mixed(alpha[k], v[k], w), x, y)
                slope = product(hand.each(np.subtract, v[k], w), g)
                v[k] = hand.each(lambda v, g, a=alpha[k]: v - hand.LR * a * g, v[k], g)
                alpha[k] -= hand.LR * slope if adaptive else 0.0
                w = hand.descend(w, [batch])
            alpha[k] = min(max(alpha[k], 0.0), 1.0)
            ends.append(w)
        model = hand.average(np.array(hand.SIZES) / 6, ends)
    hand.same(ran.outcome.params, model)
    for k in range(3):
        hand.same(hand.row(ran.outcome.personal["params"], k), mixed(alpha[k], v[k], model))
    if adaptive:
        found = ran.memory("apfl")["v"]["apfl.alpha"].numpy()
        np.testing.assert_allclose(found, alpha, rtol=1e-10)
        assert len(set(alpha)) == 3, "each client has its own"


def test_the_ends_of_alpha(engine: str) -> None:
    """alpha = 0 tests the global model; with alpha = 1 a client is alone, as Ditto's without a
    pull."""
    nothing = hand.run("apfl", {"apfl": {"alpha": 0.0}}, engine=engine)
    for name, leaf in nothing.outcome.personal["params"].items():
        assert torch.equal(leaf, nothing.outcome.params[name].expand_as(leaf))
    alone = hand.run("apfl", {"apfl": {"alpha": 1.0}}, engine=engine)
    ditto = hand.run("ditto", {"ditto": {"lam": 0.0}}, engine=engine)
    for k in range(3):
        wanted = hand.arrays(hand.row(ditto.outcome.personal["params"], k))
        hand.same(hand.row(alone.outcome.personal["params"], k), wanted)


def test_alpha_beyond_an_end_has_the_gradient_of_one_inside() -> None:
    """The mixture takes it as 1; the slope <v - w, g> can bring it back."""
    v = {"w": torch.tensor([3.0, 1.0]), "apfl.alpha": torch.tensor(1.25, requires_grad=True)}
    w, unread = {"w": torch.tensor([1.0, 2.0])}, cast(Client, None)
    mixture = APFL(adaptive=True).own_model(v, w, unread).params["w"]
    assert mixture.tolist() == [3.0, 1.0]
    (mixture @ torch.tensor([10.0, 100.0])).backward()
    assert v["apfl.alpha"].grad == 10.0 * (3 - 1) + 100.0 * (1 - 2)
