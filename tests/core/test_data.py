"""Batches as views of a data set, ragged or padded, and the sums and means over them."""

from __future__ import annotations

import pytest
import torch

from fedml_noniid.core.data import (
    Batch,
    Pass,
    Samples,
)
from fedml_noniid.core.errors import UserError

SAMPLES = Samples(
    torch.arange(24.0).reshape(8, 3), torch.arange(8) % 3
)  # sample i is (3 i, 3 i + 1, 3 i + 2)
RAGGED = Pass(SAMPLES, torch.tensor([5, 2, 7, 0, 1]), sizes=(2, 2, 1))
PADDED = Pass(
    SAMPLES, torch.tensor([[5, 2], [7, 0], [1, 1]]), mask=torch.tensor([[1, 1], [1, 1], [1, 0]])
)
BESIDE = Pass(SAMPLES, torch.tensor([[[5, 2], [1, 3]], [[7, 0], [4, 6]]]))  # [S, M, B]
BOTH = pytest.mark.parametrize("of", [RAGGED, PADDED], ids=["ragged", "padded"])


@pytest.mark.parametrize(
    "of", [RAGGED, PADDED, BESIDE], ids=["ragged", "padded", "several clients"]
)
def test_a_batch_has_the_samples_of_its_positions(of: Pass) -> None:
    found = [(batch.x[..., 0] / 3).long().tolist() for batch in of]
    assert found == (of.index.tolist() if of.sizes is None else [[5, 2], [7, 0], [1]])
    for batch in of:
        assert (
            torch.equal(batch.x, batch.x[..., :1] + torch.arange(3))
            and batch.x.shape[:-1] == batch.y.shape
        )
        assert torch.equal(batch.y, (batch.x[..., 0] / 3).long() % 3)
    assert len(of) == len(found)


@BOTH
def test_class_counts_are_those_of_the_labels(of: Pass) -> None:
    """Labels of 5, 2, 7, 0, 1 are 2, 2, 1, 0, 1."""
    found = of.class_counts(4)
    assert found.dtype == torch.float64 and found.tolist() == [1, 2, 2, 0]


def test_a_mean_over_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="without samples has no mean"):
        Pass(SAMPLES, torch.empty(0, dtype=torch.int64), sizes=()).mean(
            lambda batch: {"x": batch.x}
        )


def test_a_shuffled_pass_meets_every_sample_once_per_epoch_in_a_new_order() -> None:
    of = Pass(SAMPLES, torch.arange(7), sizes=(7,))
    batches = list(of.shuffled(torch.tensor(3), epochs=2, batch_size=3))
    assert [len(batch.y) for batch in batches] == [3, 3, 1] * 2
    met = [
        torch.cat([batch.x[:, 0] for batch in part]).tolist() for part in (batches[:3], batches[3:])
    ]
    assert sorted(met[0]) == sorted(met[1]) == [3.0 * i for i in range(7)] and met[0] != met[1]


def test_a_batch_of_padding_only_makes_no_nan() -> None:
    empty = Batch(SAMPLES.x[:2], SAMPLES.y[:2], mask=torch.zeros(2))
    assert empty.mean(empty.x).tolist() == [0, 0, 0] and empty.sum(empty.x).tolist() == [0, 0, 0]
