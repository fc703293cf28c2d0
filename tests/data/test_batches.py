"""Which samples a client reads in which step."""

from __future__ import annotations

import numpy as np
import pytest

from fedml_noniid.data.batches import epochs
from fedml_noniid.data.streams import stream

OWN = np.array([3, 5, 8, 9, 11, 20, 21])


def order(**options: object):
    return epochs(OWN, 2, 3, stream(0, "batches", 1, 2), **options)


def test_two_epochs_keep_the_last_short_batch():
    found = order()
    assert found.sizes == (3, 3, 1, 3, 3, 1)
    for epoch in np.split(found.index, 2):
        assert sorted(epoch) == OWN.tolist()
    assert found.index[:7].tolist() != found.index[7:].tolist(), "reshuffled"


def test_a_short_batch_is_left_out_unless_it_is_all_there_is():
    whole, dropped = order(), order(drop_last=True)
    assert dropped.sizes == (3, 3, 3, 3)
    assert dropped.index.tolist() == [*whole.index[:6], *whole.index[7:13]]
    assert epochs(OWN[:2], 2, 3, stream(0, "batches", 1, 2), drop_last=True).sizes == (2, 2)
    rng = stream(0, "batches", 1, 2)
    assert whole.index.tolist() == [*OWN[rng.permutation(7)], *OWN[rng.permutation(7)]]


@pytest.mark.parametrize(
    ("steps", "sizes"),
    [
        (1, (3,)),
        (2, (3, 3)),
        (3, (3, 3, 1)),
        (5, (3, 3, 1, 3, 3)),
        (7, (3, 3, 1, 3, 3, 1, 3)),
    ],
)
def test_steps_in_place_of_epochs_begin_as_the_epochs_do(steps: int, sizes: tuple[int, ...]):
    found = order(steps=steps)
    assert found.sizes == sizes
    n = min(len(found.index), 14)
    assert found.index[:n].tolist() == order().index[:n].tolist()
