"""The project's own network."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    def __init__(self, n_classes: int, seed: int = 0) -> None:
        """`seed`: server and silos draw the same first parameters."""
        torch.manual_seed(seed)
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.drop, self.out = nn.Dropout(0.1), nn.Linear(8 * 16, n_classes)

    def forward(self, x: Tensor) -> Tensor:  # [B, 1, 8, 8] -> [B, n_classes]
        x = torch.max_pool2d(torch.relu(self.norm(self.conv(x))), 2)
        return self.out(self.drop(x.flatten(1)))
