"""The papers' convolutional networks: each against torch's modules, dropout, and both engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedml_noniid.core.data import Samples
from fedml_noniid.core.randomness import fold, uniform
from fedml_noniid.engines.run import Outcome
from fedml_noniid.models import build
from fedml_noniid.models.forward import Forward
from fedml_noniid.models.layers import DROPOUT, Dropout
from fedml_noniid.models.stacked import DRAWN_AT_A_TIME
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


def vgg_convs(n_in: int, plan: str, norm: bool = False) -> list[nn.Module]:
    modules: list[nn.Module] = []
    for word in plan.split():
        if word == "M":
            modules.append(nn.MaxPool2d(2, 2))
        else:
            n_out = int(word)
            modules.append(nn.Conv2d(n_in, n_out, 3, padding=1))
            if norm:
                modules.append(nn.BatchNorm2d(n_out))
            modules.append(nn.ReLU())
            n_in = n_out
    return modules


A = "64 M 128 M 256 256 M 512 512 M 512 512 M"
D = "64 64 M 128 128 M 256 256 256 M 512 512 512 M 512 512 512 M"


def fednnnn_mnist() -> nn.Module:
    return nn.Sequential(
        *(
            nn.Conv2d(1, 20, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(20, 50, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ),
        *(nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, C)),
    )


def fednnnn_cifar() -> nn.Module:
    return nn.Sequential(
        *(*vgg_convs(3, "32 32 M 64 64 M 128 128 M", norm=True), nn.Flatten()),
        *(nn.Linear(2048, 382), nn.ReLU(), nn.Linear(382, 192), nn.ReLU(), nn.Linear(192, C)),
    )


def vgg9() -> nn.Module:
    return nn.Sequential(
        *(
            *vgg_convs(3, "32 64 M 128 128 M"),
            Drop(1, 0.05, channels=True),
            *vgg_convs(128, "256 256 M"),
        ),
        *(
            nn.Flatten(),
            Drop(2, 0.1),
            nn.Linear(4096, 512),
            nn.ReLU(),
            nn.Linear(512, 512),
            nn.ReLU(),
        ),
        *(Drop(3, 0.1), nn.Linear(512, C)),
    )


def vgg11() -> nn.Module:
    return nn.Sequential(
        *(*vgg_convs(3, A), nn.Flatten(), Drop(1, 0.5), nn.Linear(512, 512), nn.ReLU()),
        *(Drop(2, 0.5), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, C)),
    )


def vgg16() -> nn.Module:
    return nn.Sequential(
        *vgg_convs(3, D, norm=True), nn.Flatten(), nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, C)
    )


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


def resnet18() -> nn.Module:
    widths = [
        (64, 64, 1),
        (64, 64, 1),
        (64, 128, 2),
        (128, 128, 1),
        (128, 256, 2),
        (256, 256, 1),
        (256, 512, 2),
    ]
    return nn.Sequential(
        *(nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
        *(BasicBlock(*width) for width in [*widths, (512, 512, 1)]),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, C)),
    )


def cnn(norm: bool) -> nn.Module:
    def conv(n_in: int, n_out: int) -> list[nn.Module]:
        norms = [nn.BatchNorm2d(n_out)] if norm else []
        return [nn.Conv2d(n_in, n_out, 5, padding=2), *norms, nn.ReLU(), nn.MaxPool2d(2)]

    dense = nn.Linear(64 * 4, 512), nn.ReLU(), nn.Linear(512, C)
    return nn.Sequential(*conv(1, 32), *conv(32, 64), nn.Flatten(), *dense)


def pfl_cnn() -> nn.Module:
    return nn.Sequential(
        *(
            nn.Conv2d(3, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            Drop(1, 0.25),
        ),
        *(nn.Flatten(), nn.Linear(64 * 2 * 2, 128), nn.ReLU(), Drop(2, 0.5), nn.Linear(128, C)),
    )


NETWORKS: dict[str, tuple[tuple[int, int, int], Callable[[], nn.Module]]] = {
    "fednnnn_mnist": ((1, 28, 28), fednnnn_mnist),
    "fednnnn_cifar": ((3, 32, 32), fednnnn_cifar),
    "vgg9": ((3, 32, 32), vgg9),
    "vgg11": ((3, 32, 32), vgg11),
    "vgg16": ((3, 32, 32), vgg16),
    "resnet18": ((3, 16, 16), resnet18),
    "pfl_cnn": ((3, 8, 8), pfl_cnn),
}
DROPPING = ["vgg9", "vgg11", "pfl_cnn"]


def doubled(tree: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: leaf.double() for key, leaf in tree.items()}


def images(shape: tuple[int, ...], n: int, seed: int = 0) -> Tensor:
    return torch.randn(
        n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


@pytest.mark.parametrize(
    ("kind", "plain"),
    thinned(product((*NETWORKS, "cnn", "cnn with batch norm"), (False, True)), every=2),
)
def test_a_network_equals_torchs_modules(kind: str, plain: bool) -> None:
    """Logits, gradient and running statistics of a batch in train mode, then the logits of another
    in eval mode."""
    norm = kind.endswith("norm")
    shape, reference = NETWORKS.get(kind, ((1, 8, 8), partial(cnn, norm)))
    options = {"batch_norm": True} if norm else {}
    network: Any = build(kind.partition(" ")[0], shape, C, options)
    network = replace(network, plain=plain)
    params, buffers = map(doubled, network.init(torch.Generator().manual_seed(0)))
    theirs = reference().double()
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


@pytest.mark.parametrize("kind", DROPPING)
def test_dropout_is_off_in_eval_mode_and_where_it_is_switched_off(kind: str) -> None:
    shape, _ = NETWORKS[kind]
    on, off = build(kind, shape, C), build(kind, shape, C, {"dropout": False})
    params, buffers = on.init(torch.Generator().manual_seed(0))
    again, _ = off.init(torch.Generator().manual_seed(0))
    assert all(torch.equal(params[key], again[key]) for key in params)
    x = images(shape, 2).float()
    wanted = off(params, buffers, x, True).logits
    assert torch.equal(on(params, buffers, x, False).logits, wanted)
    assert torch.equal(on(params, buffers, x, False, key=KEY).logits, wanted)
    assert not torch.equal(on(params, buffers, x, True, key=KEY).logits, wanted)
    with pytest.raises(
        ValueError, match=r"dropout 1: a pass in train mode needs a key .*, got none"
    ):
        on(params, buffers, x, True)


SMALLEST = {kind: shape for kind, (shape, _) in NETWORKS.items()} | {
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
    options = {"of": of, "model": build(kind, shape, C), "cohort": len(sizes)} | settings
    return federation.run(recipe, dtype=torch.float64, engine=engine, **options)


def close(found: Outcome, wanted: Outcome) -> None:
    for part in ("params", "buffers"):
        a, b = getattr(found, part), getattr(wanted, part)
        assert a.keys() == b.keys()
        for key, leaf in b.items():
            torch.testing.assert_close(a[key], leaf, rtol=1e-7, atol=1e-9, msg=key)


LARGE = ("vgg11", "vgg16")  # made of the same blocks as the others


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.slow if kind in LARGE else ()) for kind in NETWORKS],
)
def test_both_engines_train_a_network_alike(kind: str) -> None:
    """Two clients of 2 and 3 samples, one step: the first is padded by one sample in the vectorized
    engine."""
    wanted = outcome(kind, "sequential")
    close(outcome(kind, "vectorized"), wanted)
    assert all(
        leaf.is_contiguous() for leaf in wanted.params.values()
    )  # whatever layout its gradient came in


SERVER: dict[str, Any] = {
    "feddf": {"feddf": {"steps": 3}},
    "fedftg": {"fedftg": {"iterations": 2, "model_steps": 2, "batch_size": 4}},
    "fnr": {"fnr": {"epochs": 1}},
}


@pytest.mark.parametrize(
    "recipe", ["fedavg", "feddf", "fedftg", "fnr", "scaffold", "moon", "rfedavg"]
)
def test_both_engines_drop_alike_over_ragged_steps(recipe: str) -> None:
    """Clients of 2, 7 and 4 samples over two epochs and rounds: 2, 6 and 4 steps; the server's
    training has keys."""
    options = {"recipe": recipe, "rounds": 2, "epochs": 2, "lr": 0.05}
    if recipe in SERVER:
        options["settings"] = SERVER[recipe]
    found, wanted = (
        outcome("pfl_cnn", engine, sizes=(2, 7, 4), **options)
        for engine in ("vectorized", "sequential")
    )
    close(found, wanted)


def test_fednlrs_layers_may_be_shortcuts_and_lack_a_bias() -> None:
    found, wanted = (
        outcome("resnet18", engine, recipe="fednlr") for engine in ("vectorized", "sequential")
    )
    close(found, wanted)


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


@pytest.mark.parametrize("ahead", [1, 1 << 30])
@pytest.mark.parametrize("kind", DROPPING)
def test_factors_drawn_ahead_are_those_of_each_step(
    kind: str, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps of two clients with one and another batch size, one step or all of them at a
    time."""
    monkeypatch.setitem(DRAWN_AT_A_TIME, "cpu", ahead)
    net = build(kind, SMALLEST[kind], C)
    params, buffers = net.init(torch.Generator().manual_seed(0))
    keys = torch.tensor([[1, 2, 3], [4, 5, 6]])
    x = images(SMALLEST[kind], 4).float()
    steps = list(net.draws_ahead(params, buffers, x[:1], keys, 4))
    assert len(steps) == 3
    for step, drawn in enumerate(steps):
        for client in range(2):
            for batch in (4, 2):
                own = {name: leaf[client] for name, leaf in drawn.items()}
                found = net(params, buffers, x[:batch], True, drawn=own).logits
                assert torch.equal(
                    found, net(params, buffers, x[:batch], True, key=keys[client, step]).logits
                )
