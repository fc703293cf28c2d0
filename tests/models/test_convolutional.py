"""The papers' convolutional networks: each against torch's modules, dropout, and both engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise, product
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedml_noniid.contract.checks import close
from fedml_noniid.core.data import Samples
from fedml_noniid.core.randomness import fold, uniform
from fedml_noniid.engines.run import Outcome
from fedml_noniid.models import build
from fedml_noniid.models.forward import Forward
from fedml_noniid.models.layers import DROPOUT, Dropout
from tests import federation
from tests.walks import thinned

KEY = torch.tensor(7)
C = 3


class Drop(nn.Module):
    """Dropout of what the key's own numbers say: whole channels or single numbers."""

    def __init__(self, number: int, p: float, channels: bool = False) -> None:
        super().__init__()
        self.number, self.p, self.channels = number, p, channels

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        shape = x.shape[:2] if self.channels else x.shape
        drawn = uniform(fold(fold(KEY, DROPOUT), self.number), *shape)
        scale = (drawn >= self.p).double() / (1 - self.p)
        return x * (scale[:, :, None, None] if self.channels else scale)


def row(n_in: int, plan: str) -> list[nn.Module]:
    """The modules of a plan: conv3 pad1 and ReLU for each number; v: without padding; w: conv5; s:
    conv5 pad2; b: a batch norm before the ReLU. M: a pool."""
    modules: list[nn.Module] = []
    for word in plan.split():
        if word == "M":
            modules.append(nn.MaxPool2d(2, 2))
            continue
        n_out, kinds = int(word.rstrip("bvws")), word.lstrip("0123456789")
        kernel, padding = {"v": (3, 0), "w": (5, 0), "s": (5, 2)}.get(kinds[:1], (3, 1))
        modules.append(nn.Conv2d(n_in, n_out, kernel, padding=padding))
        modules += [nn.BatchNorm2d(n_out)] if word.endswith("b") else []
        modules.append(nn.ReLU())
        n_in = n_out
    return modules


def dense(*sizes: int, drops: Mapping[int, Drop] = MappingProxyType({})) -> list[nn.Module]:
    """Linear layers with a ReLU between two, behind the dropout of each place."""
    modules: list[nn.Module] = [nn.Flatten()]
    for place, (n_in, n_out) in enumerate(pairwise((*sizes, C))):
        modules += [drops[place]] if place in drops else []
        modules += [nn.Linear(n_in, n_out), nn.ReLU()]
    return modules[:-1]


class BasicBlock(nn.Module):
    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = (
            nn.Conv2d(n_in, n_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(n_out),
        )
        self.conv2, self.bn2 = nn.Conv2d(n_out, n_out, 3, 1, 1, bias=False), nn.BatchNorm2d(n_out)
        self.shortcut = nn.Sequential()
        if stride != 1 or n_in != n_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(n_in, n_out, 1, stride, bias=False), nn.BatchNorm2d(n_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.shortcut(x))


def resnet18() -> list[nn.Module]:
    widths = (64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1)
    return [
        *(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *(BasicBlock(*width) for width in (*widths, (256, 512, 2), (512, 512, 1))),
        *(nn.AdaptiveAvgPool2d(1), *dense(512)),
    ]


NORMED_VGG_16 = "64b 64b M 128b 128b M 256b 256b 256b M 512b 512b 512b M 512b 512b 512b M"
NETWORKS: dict[str, tuple[tuple[int, int, int], Callable[[], list[nn.Module]]]] = {
    "cnn": ((1, 8, 8), lambda: [*row(1, "32s M 64s M"), *dense(256, 512)]),
    "cnn with batch norm": ((1, 8, 8), lambda: [*row(1, "32sb M 64sb M"), *dense(256, 512)]),
    "fednnnn_mnist": ((1, 28, 28), lambda: [*row(1, "20w M 50w M"), *dense(800, 500)]),
    "fednnnn_cifar": (
        (3, 32, 32),
        lambda: [*row(3, "32b 32b M 64b 64b M 128b 128b M"), *dense(2048, 382, 192)],
    ),
    "vgg9": (
        (3, 32, 32),
        lambda: [
            *(*row(3, "32 64 M 128 128 M"), Drop(1, 0.05, channels=True), *row(128, "256 256 M")),
            *dense(4096, 512, 512, drops={0: Drop(2, 0.1), 2: Drop(3, 0.1)}),
        ],
    ),
    "vgg11": (
        (3, 32, 32),
        lambda: [
            *row(3, "64 M 128 M 256 256 M 512 512 M 512 512 M"),
            *dense(512, 512, 512, drops={0: Drop(1, 0.5), 1: Drop(2, 0.5)}),
        ],
    ),
    "vgg16": ((3, 32, 32), lambda: [*row(3, NORMED_VGG_16), *dense(512, 128)]),
    "resnet18": ((3, 16, 16), resnet18),
    "pfl_cnn": (
        (3, 8, 8),
        lambda: [
            *(*row(3, "32v 64v M"), Drop(1, 0.25)),
            *dense(64 * 2 * 2, 128, drops={1: Drop(2, 0.5)}),
        ],
    ),
}


def images(shape: tuple[int, ...], n: int, seed: int = 0) -> Tensor:
    return torch.randn(
        n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


@pytest.mark.parametrize(("kind", "plain"), thinned(product(NETWORKS, (False, True)), every=2))
def test_a_network_equals_torchs_modules(kind: str, plain: bool) -> None:
    """Logits, gradient and running statistics of a batch in train mode, then the logits of another
    in eval mode."""
    shape, reference = NETWORKS[kind]
    options = {"batch_norm": True} if kind.endswith("norm") else {}
    network: Any = build(kind.partition(" ")[0], shape, C, options)
    network = replace(network, plain=plain)
    trees = network.init(torch.Generator().manual_seed(0))
    params, buffers = ({key: leaf.double() for key, leaf in tree.items()} for tree in trees)
    theirs = nn.Sequential(*reference()).double()
    with torch.no_grad():
        for leaf, mine in zip(theirs.parameters(), params.values(), strict=True):
            leaf.copy_(mine)
    x = images(shape, 3)
    watched = {key: leaf.requires_grad_() for key, leaf in params.items()}
    out = network(watched, buffers, x, True, key=KEY)
    wanted = theirs(x)
    torch.testing.assert_close(out.logits, wanted, rtol=1e-9, atol=1e-10)
    got = torch.autograd.grad(out.logits.square().sum(), list(watched.values()))
    other = torch.autograd.grad(wanted.square().sum(), list(theirs.parameters()))
    for name, g, h in zip(watched, got, other, strict=True):
        assert (g - h).norm() <= 1e-7 * h.norm() + 1e-9, name
    running = [
        leaf for name, leaf in theirs.named_buffers() if not name.endswith("num_batches_tracked")
    ]
    for mine, leaf in zip(out.buffers.values(), running, strict=True):
        torch.testing.assert_close(mine, leaf, rtol=1e-9, atol=1e-12)
    theirs.eval()
    x = images(shape, 2, seed=1)
    evaluated = network(params, out.buffers, x, False)
    torch.testing.assert_close(evaluated.logits, theirs(x), rtol=1e-9, atol=1e-10)


SMALLEST = {kind: shape for kind, (shape, _) in NETWORKS.items() if " " not in kind} | {
    "resnet18": (3, 8, 8),
    "pfl_cnn": (3, 6, 6),
}


def outcome(
    kind: str,
    engine: str,
    sizes: tuple[int, ...] = (2, 3),
    **options: Any,
) -> Outcome:
    """FedAvg of clients of `sizes` samples, in batches of 3, from a network's own start."""
    shape = SMALLEST[kind]

    def draw(n: int, seed: int) -> Samples:
        return Samples(images(shape, n, seed), torch.arange(n) % C)

    total = sum(sizes)
    splits = np.split(np.arange(total), np.cumsum(sizes)[:-1])
    of = federation.Federation(draw(total, 1), splits, draw(2, 2), draw(4, 3))
    settings = {"rounds": 1, "epochs": 1, "batch_size": 3, "lr": 0.01, "recipe": "fedavg"} | options
    recipe = settings.pop("recipe")
    options = {"data": of, "model": build(kind, shape, C), "cohort": len(sizes)} | settings
    return federation.run(recipe, dtype=torch.float64, engine=engine, **options)


QUICK = ("fednnnn_mnist", "resnet18", "pfl_cnn")  # made of the same blocks as the others


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in SMALLEST],
)
def test_both_engines_train_a_network_alike(kind: str) -> None:
    """Two clients of 2 and 3 samples, one step: the first is padded by one sample in the vectorized
    engine."""
    found, wanted = (outcome(kind, engine) for engine in ("vectorized", "sequential"))
    close(found.params | found.buffers, wanted.params | wanted.buffers, 1e-7)
    assert all(
        leaf.is_contiguous() for leaf in wanted.params.values()
    )  # whatever layout its gradient came in


FEDFTG = {"fedftg": {"iterations": 2, "model_steps": 2, "batch_size": 4}}


@pytest.mark.parametrize("recipe", ["fedavg", "fedftg", "moon"])
def test_both_engines_drop_alike_over_ragged_steps(recipe: str) -> None:
    """Clients of 2, 7 and 4 samples over two epochs and rounds: 2, 6 and 4 steps; the server's
    training has keys."""
    how: dict[str, Any] = {"recipe": recipe, "rounds": 2, "epochs": 2, "lr": 0.05}
    how["settings"] = FEDFTG if recipe == "fedftg" else {}
    found, wanted = (
        outcome("pfl_cnn", engine, sizes=(2, 7, 4), **how)
        for engine in ("vectorized", "sequential")
    )
    close(found.params, wanted.params, 1e-7)


def test_every_step_drops_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """One client of three samples, two epochs: its two steps have two keys, and another round's two
    others."""
    factors: list[bytes] = []
    kept = Dropout._factors

    def watched(self: Dropout, run: Forward, x: Tensor) -> Tensor:
        found = kept(self, run, x)
        if self.number == 2:
            factors.append(found.numpy().tobytes())
        return found

    monkeypatch.setattr(Dropout, "_factors", watched)
    outcome("pfl_cnn", "sequential", sizes=(3,), epochs=2, rounds=2)
    assert len(factors) == len(set(factors)) == 4
