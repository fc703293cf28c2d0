"""The pure optimisers equal their namesakes in `torch.optim`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedml_noniid.core import optimizers
from fedml_noniid.core.trees import Params, add
from fedml_noniid.engines.plan import LocalTraining

TORCH: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "rmsprop": torch.optim.RMSprop,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"weight_decay": 0.1}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "weight_decay": 0.1}),
    ("adam", {}),
    ("adam", {"weight_decay": 0.1}),
    ("rmsprop", {}),
    ("rmsprop", {"weight_decay": 0.1}),
    ("rmsprop", {"momentum": 0.9}),
    ("rmsprop", {"momentum": 0.9, "weight_decay": 0.1}),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
STEPS = 20


def build(
    name: str, lr: float, momentum: float | None = None, weight_decay: float = 0.0
) -> optimizers.Optimizer:
    return LocalTraining(
        optimizer=name, lr=lr, epochs=1, batch_size=1, momentum=momentum, weight_decay=weight_decay
    ).build()


def gradient(params: Params) -> Params:
    """Of a bowl with a ripple, so that directions change: sum(w^4 / 4 + sin(5 w))."""
    return {key: w**3 + 5 * torch.cos(5 * w) for key, w in params.items()}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_twenty_steps_equal_torch_optim(
    name: str, options: dict[str, float], dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(1)
    params = {
        key: torch.randn(shape, generator=generator).to(dtype)
        for key, shape in (("w", (3, 2)), ("b", (3,)))
    }
    theirs = {key: torch.nn.Parameter(leaf.clone()) for key, leaf in params.items()}
    reference = TORCH[name](list(theirs.values()), lr=0.02, **options)
    pure = build(name, 0.02, options.get("momentum"), options.get("weight_decay", 0.0))

    state = pure.init(params)
    for _ in range(STEPS):
        for key, g in gradient({key: leaf.detach() for key, leaf in theirs.items()}).items():
            theirs[key].grad = g
        reference.step()
        update, state = pure.step(gradient(params), state, params)
        params = add(params, update)
        for key, leaf in params.items():
            assert leaf.dtype == dtype
            torch.testing.assert_close(
                leaf, theirs[key].detach(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
            )


@pytest.mark.parametrize("norm", [0.5, 100.0])
def test_clipped_gradients_are_torchs(norm: float) -> None:
    """(3, 4) and 12 have norm 13."""
    grads = {
        "w": torch.tensor([3.0, 4.0], dtype=torch.float64),
        "b": torch.tensor([12.0], dtype=torch.float64),
    }
    theirs = [torch.nn.Parameter(torch.zeros_like(g)) for g in grads.values()]
    for leaf, g in zip(theirs, grads.values(), strict=True):
        leaf.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(theirs, norm)
    pure = optimizers.SGD(0.1, clip=norm, weight_decay=0.3)  # which is not clipped
    update, _ = pure.step(grads, pure.init(grads), grads)
    for name, leaf in zip(grads, theirs, strict=True):
        assert leaf.grad is not None
        wanted = -0.1 * (leaf.grad + 0.3 * grads[name])  # the parameters are the same numbers
        torch.testing.assert_close(update[name], wanted, rtol=1e-12, atol=0)
