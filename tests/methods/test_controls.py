"""The two controls: public data given to everybody, and no federation at all."""

from __future__ import annotations

import numpy as np
import pytest

from tests.methods import by_hand as hand

ALL_X, ALL_Y = np.concatenate([hand.X, hand.PUBLIC_X]), np.concatenate([hand.Y, hand.PUBLIC_Y])


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_every_client_trains_on_the_shared_samples_too(engine: str, share: float) -> None:
    """All of the public split's four or every second one, in full batches with the client's own;
    n_k counts both, so p = (5, 6, 7) / 18 or (3, 4, 5) / 12."""
    shared = np.arange(6, 10, round(1 / share))
    ran = hand.run("datasharing", {"datasharing": {"share": share}}, engine=engine, batch_size=16)

    def local(w: hand.Tree, k: int, _: list[hand.Array]) -> hand.Tree:
        batch = np.concatenate([hand.CLIENTS[k], shared])
        return hand.descend(w, [batch] * 2, x=ALL_X, y=ALL_Y)

    n = [size + len(shared) for size in hand.SIZES]
    hand.same(ran.outcome.params, ran.federated(local, n))
    assert [reply.n.tolist() for _, reply in ran.exchanges] == [n] * 2


def test_centralised_is_gradient_descent_on_the_union(engine: str) -> None:
    """Two epochs a round over all six samples in batches of 4 and 2, whatever the cohort."""
    ran = hand.run("centralised", engine=engine, cohort=2, batch_size=4)
    w = hand.W0
    for t in (1, 2):
        batches = ran.batches(0, t)
        assert [len(batch) for batch in batches] == [4, 2, 4, 2]
        assert sorted(np.concatenate(batches[:2])) == list(range(6))
        w = hand.descend(w, batches)
    hand.same(ran.outcome.params, w)
    assert [(ask.job, ask.to) for ask, _ in ran.exchanges] == [("train", (0,))] * 2
