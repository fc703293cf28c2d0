"""What FedGen and FedFTG draw; their own tests have the rest."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.baselines.generators import (
    draw_labels,
    init,
)

COUNTS = torch.tensor([[3.0, 0.0, 1.0, 0.0], [1.0, 0.0, 5.0, 0.0]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_initial_weights_fill_their_range(dtype: torch.dtype) -> None:
    """Uniform in +-1/sqrt(inputs): 40 + 10 and 300 inputs."""
    g = init(torch.tensor(3), 40, 10, 300, 20, torch.zeros((), dtype=dtype))
    for name, shape, inputs in (
        ("w1", (300, 50), 50),
        ("b1", (300,), 50),
        ("w2", (20, 300), 300),
        ("b2", (20,), 300),
    ):
        leaf = g[name]
        assert (leaf.shape, leaf.dtype) == (shape, dtype)
        assert leaf.abs().max() <= inputs**-0.5
        if leaf.numel() > 100:
            assert leaf.std() == pytest.approx((3 * inputs) ** -0.5, rel=0.1), (
                "the deviation of a uniform number"
            )
    assert len({leaf.flatten()[0].item() for leaf in g.values()}) == 4


def test_labels_follow_the_cohorts_counts() -> None:
    """4 : 0 : 6 : 0 of 10, to 5 standard errors; a label that nobody has is never drawn."""
    y = draw_labels(torch.tensor(1), COUNTS, 20_000)
    share = np.bincount(y.numpy(), minlength=4) / 20_000
    assert share[[1, 3]].tolist() == [0, 0]
    assert abs(share[0] - 0.4) < 5 * np.sqrt(0.24 / 20_000)
    assert torch.equal(y, draw_labels(torch.tensor(1), COUNTS, 20_000))
    assert not torch.equal(y, draw_labels(torch.tensor(2), COUNTS, 20_000))
