"""What FNR-FL records of a refinement; nothing here changes a model."""

from __future__ import annotations

import torch
from torch import Tensor

from fedml_noniid.core.trees import Tree


def figure_5(before: Tensor, after: Tensor) -> Tree:
    """Accuracy on D_public by class, [C], from `FNR.by_class` [3, C]; NaN for a class without
    samples there."""
    return {"before": before[1] / before[2], "after": after[1] / after[2]}


def by_client(norms: Tensor, worst: Tensor, delta: Tensor, refined: Tensor) -> Tree:
    """The refined clients, [M], and their Delta, [M, C], 0 for the others.

    `norms` is F [M, C]. `delta` [n_re, C] belongs to the rows `worst`; of these, the rows `refined`
    answered.
    """
    is_refined = torch.zeros_like(norms[:, 0], dtype=torch.bool).index_fill(0, refined, True)
    return {
        "refined": is_refined,
        "delta": is_refined[:, None] * torch.zeros_like(norms).index_copy(0, worst, delta),
    }
