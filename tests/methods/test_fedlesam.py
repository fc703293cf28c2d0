"""FedLESAM (Fan et al. 2024) against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

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
    lengths = []

    def local(w: hand.Tree, w_old: hand.Tree, k: int, batches: list[hand.Array]) -> Any:
        delta = to_length(RHO, hand.each(np.subtract, w_old, w))
        lengths.append(hand.length(delta))

        def direction(v: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
            return hand.gradient(hand.each(np.add, v, delta), x, y)

        return hand.descend(w, batches, direction), w

    model, w_old = ran.kept(local, hand.W0, (1, 1, 1))
    hand.same(ran.outcome.params, model)
    for k in range(3):
        hand.same(hand.row(ran.memory("fedlesam")["w_old"], k), w_old[k])
    assert sorted({round(length, 6) for length in lengths}) == [0, RHO]
