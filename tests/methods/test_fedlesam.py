"""FedLESAM (Fan et al. 2024) against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.methods import by_hand as hand
from tests.methods.test_fedsam import to_length

RHO = 0.3
SETTINGS: dict[str, dict[str, object]] = {"fedlesam": {"rho": RHO}}


@pytest.mark.parametrize(
    "options",
    [{"rounds": 3}, {"rounds": 6, "cohort": 2, "batch_size": 2}],
    ids=["full", "twos"],
)
def test_its_lines(engine: str, options: dict[str, Any]) -> None:
    """w_old is the model that the client received when it last took part, not that of the last
    round; before that it is w_0."""
    ran = hand.run("fedlesam", SETTINGS, engine=engine, **options)
    w_old = [hand.W0 for _ in hand.CLIENTS]
    lengths = []

    def local(w: hand.Tree, k: int, batches: list[hand.Array]) -> hand.Tree:
        delta = to_length(RHO, hand.each(np.subtract, w_old[k], w))
        lengths.append(hand.length(delta))
        w_old[k] = w
        return hand.descend(
            w, batches, lambda w, x, y: hand.gradient(hand.each(np.add, w, delta), x, y)
        )

    hand.same(ran.outcome.params, ran.federated(local, (1, 1, 1)))
    for k in range(3):
        hand.same(hand.row(ran.memory("fedlesam")["w_old"], k), w_old[k])
    assert sorted({round(length, 6) for length in lengths}) == [0, RHO]


def test_the_first_round_is_fedavgs(engine: str) -> None:
    """Received and old model are both w_0."""
    ours = hand.run("fedlesam", {"fedlesam": {"weights": "size"}}, engine=engine, rounds=1)
    for key, leaf in hand.run("fedavg", engine=engine, rounds=1).outcome.params.items():
        torch.testing.assert_close(ours.outcome.params[key], leaf, rtol=1e-13, atol=1e-15)
