"""The workloads' networks as plain torch modules.

Their parameters have the names of `models`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """pixels - hidden - classes with ReLU."""

    def __init__(self, shape: tuple[int, ...], hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape[0] * shape[1] * shape[2], hidden)
        self.fc2 = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(torch.relu(self.fc1(x.flatten(1))))
        return out


class CNN(nn.Module):
    """rFedAvg's CNN: two pooled 5 x 5 convolutions and 512 features.

    Pooling before the ReLU gives the same values.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(shape[0], 32, 5, padding=2)
        self.conv2 = nn.Conv2d(32, 64, 5, padding=2)
        self.fc1 = nn.Linear(64 * (shape[1] // 4) * (shape[2] // 4), 512)
        self.fc2 = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        for conv in (self.conv1, self.conv2):
            x = torch.relu(F.max_pool2d(conv(x), 2))
        out: Tensor = self.fc2(torch.relu(self.fc1(x.flatten(1))))
        return out


class PflCNN(nn.Module):
    """pfl-research's `simple_cnn` without dropout.

    Pooling before the second ReLU gives the same values.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(shape[0], 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.fc1 = nn.Linear(64 * ((shape[1] - 4) // 2) * ((shape[2] - 4) // 2), 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(F.max_pool2d(self.conv2(torch.relu(self.conv1(x))), 2))
        out: Tensor = self.fc2(torch.relu(self.fc1(x.flatten(1))))
        return out


class ResNet18(nn.Module):
    """ResNet-18 for small images: no pool after the first convolution, batch norms in train
    mode."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self._normalised("conv1", shape[0], 64, 3, 1)
        self._blocks: list[tuple[str, bool]] = []
        n_in = 64
        for stage, n_out in enumerate((64, 128, 256, 512), start=1):
            for index in (1, 2):
                name, stride = f"block{stage}_{index}", 2 if stage > 1 and index == 1 else 1
                self._normalised(f"{name}_conv1", n_in, n_out, 3, stride)
                self._normalised(f"{name}_conv2", n_out, n_out, 3, 1)
                if stride > 1:
                    self._normalised(f"{name}_shortcut", n_in, n_out, 1, stride)
                self._blocks.append((name, stride > 1))
                n_in = n_out
        self.fc = nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self._through("conv1", x))
        for name, halves in self._blocks:
            body = self._through(f"{name}_conv2", torch.relu(self._through(f"{name}_conv1", x)))
            x = torch.relu(body + (self._through(f"{name}_shortcut", x) if halves else x))
        out: Tensor = self.fc(x.mean((2, 3)))
        return out

    def _normalised(self, name: str, n_in: int, n_out: int, kernel: int, stride: int) -> None:
        self.add_module(name, nn.Conv2d(n_in, n_out, kernel, stride, kernel // 2, bias=False))
        self.add_module(f"{name}_bn", nn.BatchNorm2d(n_out))

    def _through(self, name: str, x: Tensor) -> Tensor:
        out: Tensor = self.get_submodule(f"{name}_bn")(self.get_submodule(name)(x))
        return out


def build(name: str, shape: tuple[int, ...], hidden: int) -> nn.Module:
    """The network `name` for samples of `shape`; `hidden` is the width of `mlp`."""
    if name == "mlp":
        return MLP(shape, hidden)
    return {"cnn": CNN, "pfl_cnn": PflCNN, "resnet18": ResNet18}[name](shape)
