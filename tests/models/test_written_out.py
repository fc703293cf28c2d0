"""Gradients that are written out: against NumPy, and against autograd to the bit."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fedml_noniid.core.data import cross_entropy, masked_mean
from fedml_noniid.core.losses import CROSS_ENTROPY
from fedml_noniid.core.optimizers import SGD
from fedml_noniid.core.task import Task
from fedml_noniid.core.trees import Params
from fedml_noniid.engines.local import ClientAxis
from fedml_noniid.models import build
from fedml_noniid.models.layers import Conv, Flatten, Linear, MaxPool, ReLU
from fedml_noniid.models.stacked import Stacked

SHAPE, CLASSES, BATCH, CLIENTS = (1, 3, 4), 5, 7, 4
# Network, shape of a sample, options.
DENSE: dict[str, tuple[str, tuple[int, ...], dict[str, int]]] = {
    "logistic_regression": ("logistic_regression", SHAPE, {}),
    "mlp": ("mlp", SHAPE, {"hidden": 6}),
    "projected": ("mlp", SHAPE, {"projection": 4}),
}
KINDS = DENSE | {
    "cnn": ("cnn", (2, 8, 8), {"channels": 3, "hidden": 6}),
    "pfl_cnn": ("pfl_cnn", (3, 6, 6), {}),
    "fednnnn_mnist": ("fednnnn_mnist", (1, 28, 28), {}),
}
KEY = torch.tensor(5)  # of dropout, which pfl_cnn has


def drawn(
    kind: str, clients: int, dtype: torch.dtype, plain: bool = False
) -> tuple[Any, Params, Tensor, Tensor]:
    """A network, and parameters, samples and labels; with an axis of clients in front where there
    are several."""
    generator, rows = torch.Generator().manual_seed(3), (clients,) if clients else ()
    name, shape, options = KINDS[kind]
    made = build(name, shape, CLASSES, options)
    params = {
        key: torch.randn(*rows, *leaf.shape, generator=generator).to(dtype)
        for key, leaf in made.init(generator)[0].items()
    }
    x = torch.randn(*rows, BATCH, *shape, generator=generator).to(dtype)
    y = torch.randint(0, CLASSES, (*rows, BATCH), generator=generator)
    return replace(made, plain=plain), params, x, y


def by_autograd(
    made: Stacked, params: Params, x: Tensor, y: Tensor, mask: Tensor | None, axes: int
) -> tuple[Params, Tensor]:
    watched = {key: leaf.clone().requires_grad_() for key, leaf in params.items()}
    loss = cross_entropy(made(watched, {}, x, True, mask, KEY, axes=axes).logits, y, mask)
    return dict(
        zip(watched, torch.autograd.grad(loss.sum(), list(watched.values())), strict=True)
    ), loss.detach()


def mask_of(clients: int) -> Tensor:
    """Fewer samples for each next client, none for the last."""
    counts = (
        torch.tensor([BATCH, BATCH - 1, 2, 0])[:clients] if clients else torch.tensor(BATCH - 2)
    )
    return torch.arange(BATCH) < counts.unsqueeze(-1)


# Kind, clients, type, plain: networks of matrices also for several clients.
FORMS = [
    *[
        (kind, clients, dtype, False)
        for kind in DENSE
        for clients in (0, CLIENTS)
        for dtype in (torch.float32, torch.float64)
    ],
    *[
        (kind, 0, torch.float32, plain)
        for kind in sorted(KINDS.keys() - DENSE)
        for plain in (False, True)
    ],
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_gradient_is_autograds_to_the_bit(
    form: tuple[str, int, torch.dtype, bool], masked: bool
) -> None:
    kind, clients, dtype, plain = form
    made, params, x, y = drawn(kind, clients, dtype, plain)
    mask = mask_of(clients).squeeze(0) if masked else None
    axes = 1 if clients else 0
    expected, expected_loss = by_autograd(made, params, x, y, mask, axes)
    features = made(params, {}, x, True, key=KEY, axes=axes).features
    ahead = None
    if made.draws:
        ahead = next(made.draws_ahead(params, {}, x[:1], KEY.unsqueeze(0), BATCH))
    slope = partial(CROSS_ENTROPY.gradient, y=y, mask=mask)
    grads, losses, out = made.gradient(params, {}, x, slope, mask, ahead, axes=axes)
    assert grads.keys() == expected.keys()
    for key, leaf in expected.items():
        assert torch.equal(grads[key], leaf), key
        assert grads[key].is_contiguous() and grads[key].abs().sum() > 0
    assert torch.equal(masked_mean(losses, mask, axes), expected_loss)
    assert torch.equal(out.features, features)


def test_a_relu_before_several_pools_reads_its_own_output() -> None:
    """Pools write their gradient over their input.

    An input that a ReLU had put out would be lost to the ReLU.
    """
    blocks = (Conv("conv1", 2, 3, 3), ReLU("conv1"), MaxPool(), MaxPool(), Flatten())
    made = Stacked("pools", blocks, Linear("fc1", 12, CLASSES), plain=True)
    params, _ = made.init(torch.Generator().manual_seed(0))
    x = torch.randn(BATCH, 2, 10, 10, generator=torch.Generator().manual_seed(1))
    y = torch.arange(BATCH) % CLASSES
    expected, _ = by_autograd(made, params, x, y, None, 0)
    slope = partial(CROSS_ENTROPY.gradient, y=y, mask=None)
    grads, _, _ = made.gradient(params, {}, x, slope)
    for key, leaf in expected.items():
        assert torch.equal(grads[key], leaf), key


@pytest.mark.parametrize("batch", [1, 3, 10])
def test_memory_of_another_batch_changes_no_bit(batch: int) -> None:
    made, params, _, _ = drawn("cnn", 0, torch.float32)
    shape, generator = (2, 8, 8), torch.Generator().manual_seed(batch)
    x, y = torch.randn(batch, *shape, generator=generator), torch.arange(batch) % CLASSES
    memory: Params = {}
    slope = partial(CROSS_ENTROPY.gradient, mask=None)
    others = partial(slope, y=torch.arange(12) % CLASSES)
    made.gradient(params, {}, torch.randn(12, *shape), others, out=memory)
    expected, expected_loss = by_autograd(made, params, x.clone(), y, None, 0)
    grads, losses, _ = made.gradient(params, {}, x.clone(), partial(slope, y=y), out=memory)
    assert torch.equal(losses.mean(), expected_loss)
    for key, leaf in expected.items():
        assert torch.equal(grads[key], leaf), key


def test_other_networks_frozen_parameters_and_low_precision_are_left_to_autograd() -> None:
    made, params, _, _ = drawn("mlp", 0, torch.float32)
    head = {key: leaf for key, leaf in params.items() if key.startswith("fc2")}
    axis = ClientAxis(lambda _: pytest.fail("no client"), {})
    assert axis.written(Task(made, SGD(0.1))) and not axis.written(Task(made, SGD(0.1), head))
    assert made.written_out and not replace(made, precision="bf16").written_out
    for name, options in (("mlp", {"batch_norm": True}), ("resnet18", {})):
        assert not build(name, (1, 8, 8), CLASSES, options).written_out
