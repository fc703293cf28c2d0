"""FSL (Mai et al. 2022) against arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedml_noniid.core.randomness import fold, identity, uniform
from fedml_noniid.data.streams import key
from fedml_noniid.plugins.baselines.fsl import FSL
from tests.methods import by_hand as hand


@pytest.mark.parametrize(("epochs", "batch_size"), [(1, 32), (3, 3)])
def test_two_rounds(engine: str, epochs: int, batch_size: int) -> None:
    """Average with n_k / n, then gradient descent on the four public samples; batches of 3 are of 3
    and 1. The labels count."""
    options = {"epochs": epochs, "batch_size": batch_size}
    ran = hand.run("fsl", {"fsl": options}, engine=engine)
    w = hand.W0
    for t, _, batches in ran.rounds():
        w = hand.average(np.array(hand.SIZES) / 6, [hand.descend(w, of) for of in batches])
        at = fold(fold(torch.tensor(key(0, "server", t)), identity(FSL())), "order")
        for epoch in range(epochs):
            order = np.argsort(uniform(fold(at, epoch), 4).numpy(), kind="stable")
            parts = np.split(order, range(batch_size, 4, batch_size))
            w = hand.descend(w, parts, x=hand.PUBLIC_X, y=hand.PUBLIC_Y)
    hand.same(ran.outcome.params, w)
    assert all(reply.upload["fsl"] == {} for _, reply in ran.exchanges), "no further traffic"
