"""Networks as a user writes them: sound ones, and one for each thing that can be wrong."""

from __future__ import annotations

import numpy as np
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


class Convolutional(nn.Module):
    """Has no linear layer at all."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, CLASSES, 3)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.conv(x.unsqueeze(1))
        return h.mean(2)


class Attention(nn.Module):
    """A constant buffer of whole numbers, an embedding of them, layer norms, a class token."""

    places: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.place, self.start = nn.Embedding(4, 8), nn.Parameter(torch.randn(1, 1, 8))
        self.register_buffer("places", torch.arange(4))
        self.cut = nn.Linear(2, 8)
        self.body = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.cut(x.reshape(-1, 3, 2))
        h = torch.cat([self.start.expand(len(h), 1, 8), h], 1) + self.place(self.places)
        out: Tensor = self.out(self.body(h)[:, 0])
        return out


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight, self.out = self.one.weight, nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.out(torch.tanh(self.two(torch.tanh(self.one(x)))))
        return h


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


class Counts(Other):
    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + self.training
        return super().forward(x)


class Overwrites(Other):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clamp_(max=0.5))


class Elsewhere(Other):
    """Draws its first values from NumPy."""

    def __init__(self) -> None:
        super().__init__()
        self.fc.weight.data = torch.tensor(np.random.normal(size=(5, 6)), dtype=torch.float32)


class Extra(Other):
    """Has a layer that no pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)


class Wide(Small):
    def __init__(self) -> None:
        super().__init__(n_classes=CLASSES + 1)


class Fails(Other):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, :4])


class Cumulative(Other):
    def __init__(self) -> None:
        super().__init__()
        self.norm.momentum = None


class Fixed(Other):
    """Asks for no gradient of its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc.requires_grad_(False)


WIDE = 48, 48  # unlike all other sizes


class Adapted(nn.Module):
    """A frozen layer between others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(6, WIDE[0]), nn.Linear(WIDE[1], CLASSES)
        self.frozen = nn.Linear(*WIDE).requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.frozen(torch.tanh(self.first(x))))
        return logits


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


class Block(nn.Module):
    """A residual block, as torchvision writes it."""

    def __init__(self, n_in: int, n_out: int, alpha: float = 1.0) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(n_in, n_out, 3, 2, 1, bias=False), nn.BatchNorm2d(n_out)
        self.two, self.relu = nn.Conv2d(n_out, n_out, 3, 1, 1), nn.ReLU(inplace=True)
        self.beside, self.alpha = nn.Conv2d(n_in, n_out, 1, 2), alpha

    def forward(self, x: Tensor) -> Tensor:
        out = self.two(self.relu(self.norm(self.one(x))))
        h: Tensor = self.relu(torch.add(out, self.beside(x), alpha=self.alpha))
        return h


def convolutions(alpha: float = 1.0, window: int = 2, start: int = 1) -> nn.Module:
    """A row of our blocks for images [1, 6, 6], with the default options only."""
    return nn.Sequential(
        *(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), Block(3, 4, alpha)),
        *(nn.MaxPool2d(window, 2, (window - 2) // 2), nn.Dropout2d(0.3), nn.Identity()),
        *(nn.Flatten(start), nn.Flatten(), nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.2)),
        nn.Linear(5, CLASSES),
    )


class Functions(nn.Module):
    """A row of our blocks for images [1, 6, 6], by functions."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4, 4)
        self.out, self.twice = nn.Linear(4, CLASSES), twice

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv(x).relu(), 2)
        x = torch.relu(self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1)))
        h: Tensor = self.out(torch.relu(self.fc(x)) if self.twice else x)
        return h


class Pooled(nn.Sequential):
    """ResNet's end: a mean over positions."""

    def __init__(self, size: int = 1) -> None:
        conv, pool = nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(size)
        last = nn.Linear(4 * size * size, CLASSES)
        super().__init__(conv, nn.ReLU(), nn.MaxPool2d(2), pool, nn.Flatten(), last)
