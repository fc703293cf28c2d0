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
    w, w_old = hand.W0, [hand.W0 for _ in hand.CLIENTS]
    lengths = []
    for _, cohort, batches in ran.rounds():
        local = []
        for k, of in zip(cohort, batches, strict=True):
            delta = to_length(RHO, hand.each(np.subtract, w_old[k], w))
            lengths.append(hand.length(delta))

            def direction(
                w: hand.Tree, x: hand.Array, y: hand.Array, delta: hand.Tree = delta
            ) -> hand.Tree:
                return hand.gradient(hand.each(np.add, w, delta), x, y)

            local.append(hand.descend(w, of, direction))
            w_old[k] = w
        w = hand.average([1 / len(local)] * len(local), local)
    hand.same(ran.outcome.params, w)
    for k in range(3):
        hand.same(hand.row(ran.memory("fedlesam")["w_old"], k), w_old[k])
    assert sorted({round(length, 6) for length in lengths}) == [0, RHO]


def test_the_first_round_is_fedavgs(engine: str) -> None:
    """Received and old model are both w_0."""
    ours = hand.run("fedlesam", {"fedlesam": {"weights": "size"}}, engine=engine, rounds=1)
    for key, leaf in hand.run("fedavg", engine=engine, rounds=1).outcome.params.items():
        torch.testing.assert_close(ours.outcome.params[key], leaf, rtol=1e-13, atol=1e-15)
