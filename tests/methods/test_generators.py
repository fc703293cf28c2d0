"""What FedGen and FedFTG draw; their own tests have the rest."""

from __future__ import annotations

import numpy as np
import torch

from fedml_noniid.plugins.baselines.generators import (
    draw_labels,
)

COUNTS = torch.tensor([[3.0, 0.0, 1.0, 0.0], [1.0, 0.0, 5.0, 0.0]])


def test_labels_follow_the_cohorts_counts() -> None:
    """4 : 0 : 6 : 0 of 10, to 5 standard errors; a label that nobody has is never drawn."""
    y = draw_labels(torch.tensor(1), COUNTS, 20_000)
    share = np.bincount(y.numpy(), minlength=4) / 20_000
    assert share[[1, 3]].tolist() == [0, 0]
    assert abs(share[0] - 0.4) < 5 * np.sqrt(0.24 / 20_000)
    assert torch.equal(y, draw_labels(torch.tensor(1), COUNTS, 20_000))
    assert not torch.equal(y, draw_labels(torch.tensor(2), COUNTS, 20_000))
