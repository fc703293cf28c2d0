"""The Gaussian noise of rFedAvg's privacy evaluation (section VI-B.8, after Abadi et al. 2016)."""

from __future__ import annotations

import torch
from torch import Tensor

from plugins.core.noise import normal


def clipped(delta: Tensor, clip: float) -> Tensor:
    """delta / max(1, ||delta|| / C_0), [d]."""
    within: Tensor = delta / (torch.linalg.vector_norm(delta) / clip).clamp(min=1)
    return within


def noisy(delta: Tensor, std: float | Tensor, key: Tensor) -> Tensor:
    """delta + N(0, std^2 I), [d]."""
    return delta + std * normal(key, *delta.shape, dtype=delta.dtype)
