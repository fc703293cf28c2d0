"""Networks as a user writes them: sound ones, and one for each thing that can be wrong."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 3


class Small(nn.Module):
    """For vectors [6]: batch norm, dropout, a ReLU before the classifier."""

    def __init__(self, n_classes: int = CLASSES, hidden: int = 5, p: float = 0.25) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(6, hidden), nn.BatchNorm1d(hidden)
        self.drop, self.out = nn.Dropout(p), nn.Linear(hidden, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.out(torch.relu(self.drop(self.norm(self.fc(x)))))
        return h


class Other(Small):
    """The base of those below."""

    def __init__(self) -> None:
        super().__init__(p=0.0)


class Draws(Other):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.2, self.training))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRU(3, 4, batch_first=True), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.out(self.cell(x.reshape(-1, 2, 3))[0][:, -1])
        return h


class Branches(Other):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class Centred(Other):
    """Has a batch statistic of its own, which padding would change."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class Soft(Other):
    """Has no logits of a linear layer."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).log_softmax(1)


class Averages(Other):
    """Changes a buffer of its own in training, side by side as alone."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen = 0.5 * self.seen + self.fc.weight.detach().mean()
        return super().forward(x) + self.seen


class Fixed(Other):
    """Asks for no gradient of its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc.requires_grad_(False)


def pictures(input_shape: tuple[int, ...], n_classes: int, width: int = 4) -> nn.Module:
    """A function that makes a network for images."""
    size = width * (input_shape[1] // 2) * (input_shape[2] // 2)
    return nn.Sequential(
        nn.Conv2d(input_shape[0], width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.2),
        nn.Flatten(),
        nn.Linear(size, n_classes),
    )


def convolutions(window: int = 2, padding_mode: str = "zeros") -> nn.Module:
    """A row of our blocks for images [1, 6, 6], with the default options only."""
    conv, side = nn.Conv2d(1, 3, 3, padding=1, padding_mode=padding_mode), (6 - window) // 2 + 1
    return nn.Sequential(
        *(conv, nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.ReLU()),
        *(nn.MaxPool2d(window, 2), nn.Dropout2d(0.3), nn.Identity(), nn.Flatten(), nn.Flatten()),
        *(nn.Linear(4 * side**2, 5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, CLASSES)),
    )


class Functions(nn.Module):
    """A row of our blocks for images [1, 6, 6], by functions."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(16, 16)
        self.out, self.twice = nn.Linear(16, CLASSES), twice

    def forward(self, x: Tensor) -> Tensor:
        x = torch.flatten(F.max_pool2d(self.conv(x).relu(), 2, stride=2), 1)
        x = torch.relu(self.fc(x))
        h: Tensor = self.out(torch.relu(self.fc(x)) if self.twice else x)
        return h


class Pooled(nn.Sequential):
    """ResNet's end: a mean over positions."""

    def __init__(self, size: int = 1) -> None:
        conv, pool = nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(size)
        last = nn.Linear(4 * size * size, CLASSES)
        super().__init__(conv, nn.ReLU(), nn.MaxPool2d(2), pool, nn.Flatten(), last)
