"""How sure the network is of the diseases that it finds."""

from __future__ import annotations

import torch
from torch import Tensor


def sureness(outputs: Tensor, labels: Tensor, *, power: float = 1.0) -> dict[str, Tensor]:
    p = torch.softmax(outputs, 1).gather(1, labels[:, None])[:, 0]
    return {"sure": (p**power).mean(), "least_sure": p.min()}
