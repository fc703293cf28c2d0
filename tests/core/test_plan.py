"""Batches as views of a data set: ragged or padded, each in memory of its own or in that of the last."""

from __future__ import annotations

import pytest
import torch

from plugins.core.component import Plan, Samples

SAMPLES = Samples(torch.arange(24.0).reshape(8, 3), torch.arange(8))
RAGGED = Plan(SAMPLES, torch.tensor([5, 2, 7, 0, 1]), sizes=(2, 2, 1))
PADDED = Plan(SAMPLES, torch.tensor([[5, 2], [7, 0]]))
BESIDE = Plan(SAMPLES, torch.tensor([[[5, 2], [1, 3]], [[7, 0], [4, 6]]]))  # [S, M, B]
PLANS = pytest.mark.parametrize("plan", [RAGGED, PADDED, BESIDE], ids=["ragged", "padded", "several clients"])


@PLANS
@pytest.mark.parametrize("in_place", [False, True])
def test_a_batch_has_the_samples_of_its_positions(plan: Plan, in_place: bool) -> None:
    """Sample i is (3 i, 3 i + 1, 3 i + 2) with label i."""
    for batch in plan.batches(in_place):
        assert torch.equal(batch.x, 3.0 * batch.y.unsqueeze(-1) + torch.arange(3))
    labels = [batch.y.tolist() for batch in plan.batches(in_place)]
    assert labels == (plan.index.tolist() if plan.sizes is None else [[5, 2], [7, 0], [1]])


@PLANS
def test_batches_stay_as_they_are_unless_asked_otherwise(plan: Plan) -> None:
    places = [batch.x.data_ptr() for batch in list(plan)]
    assert len(set(places)) == len(places)
    assert len({batch.x.data_ptr() for batch in list(plan.batches(in_place=True))}) == 1
