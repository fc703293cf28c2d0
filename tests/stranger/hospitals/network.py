"""A network with a batch norm and a dropout, in a form that none of the package's blocks has."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class GatedNet(nn.Module):
    def __init__(self, n_classes: int, width: int = 4, p: float = 0.2) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width)
        self.gate, self.drop = nn.Linear(16 * width, 16 * width), nn.Dropout(p)
        self.out = nn.Linear(16 * width, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.max_pool2d(torch.tanh(self.norm(self.conv(x))), 2).flatten(1)
        return self.out(self.drop(h * torch.sigmoid(self.gate(h))))
