"""Describes what is learned: a network as encoder and classifier, and its optimiser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fedml_noniid.core.data import Batch
from fedml_noniid.core.losses import CROSS_ENTROPY, Loss
from fedml_noniid.core.optimizers import Optimizer
from fedml_noniid.core.trees import Params, Tree, tree_map


class Layer(NamedTuple):
    """A weight layer: its parameters all have one row (first axis) per neuron or channel."""

    name: str
    parameters: tuple[str, ...]  # weight, bias, and the affine pair of a batch norm that follows
    units: int  # M_l, neurons or channels


class Output(NamedTuple):
    """What a forward pass yields."""

    features: Tensor  # [B, d], the input of the classifier
    logits: Tensor  # [B, C]
    buffers: Params


class Network(Protocol):
    """A model as pure functions of its parameters and buffers. `models` builds them."""

    @property
    def name(self) -> str: ...

    @property
    def n_classes(self) -> int: ...  # C

    @property
    def feature_size(self) -> int: ...  # d, the input of the classifier

    @property
    def layers(self) -> tuple[Layer, ...]: ...  # weight layers, forward; the classifier last

    @property
    def draws(self) -> bool: ...  # whether a pass in training draws random numbers (dropout)

    def __call__(
        self,
        params: Params,
        buffers: Params,
        x: Tensor,
        train: bool,
        mask: Tensor | None,
        key: Tensor | None,
    ) -> Output:
        """The forward pass of a batch `x` [B, ...]; dropout draws from `key`."""

    def classify(self, params: Params, h: Tensor) -> Tensor:
        """Logits [B, C] of features [B, d]."""

    def activations(self, params: Params, buffers: Params, x: Tensor) -> dict[str, Tensor]:
        """Eval-mode output of every weight layer: [B, M] or [B, M, H, W]; after ReLU, logits for
        the classifier."""


Objective = Callable[[Params], tuple[Tensor, Tree]]  # w -> (0-d, what else is kept of the pass)
ValueAndGrad = Callable[[Objective, Params], tuple[Params, Tree]]


def autograd(loss: Objective, params: Params) -> tuple[Params, Tree]:
    """(gradient, detached aux) by the autograd tape.

    Of losses [M], each depends on its own rows only.
    """
    with torch.enable_grad():
        watched = {key: value.detach().requires_grad_() for key, value in params.items()}
        value, aux = loss(watched)
        grads = torch.autograd.grad(value.sum(), list(watched.values()))
    left = tree_map(torch.Tensor.detach, aux)
    # A convolution's gradient can come in its input's layout; parameters stay as they are.
    return {key: grad.contiguous() for key, grad in zip(watched, grads, strict=True)}, left


def functional(loss: Objective, params: Params) -> tuple[Params, Tree]:
    """(gradient, aux) by torch.func, which vmap can batch."""
    grads, aux = torch.func.grad(loss, has_aux=True)(params)
    return grads, aux


@dataclass(frozen=True)
class Task:
    """A network and how a client trains it: one loss, one optimiser."""

    network: Network
    optimizer: Optimizer
    fixed: Params = field(
        default_factory=dict
    )  # parameters that nobody trains; they are in no tree elsewhere
    personal: Tree = field(
        default_factory=dict
    )  # "params", "buffers" that a client keeps to itself: its own, or w_0's
    own_models: bool = False  # whether each client is tested with a model of its own
    grad: ValueAndGrad = autograd
    loss: Loss = CROSS_ENTROPY

    @property
    def lr(self) -> float:
        """eta, the local step size."""
        return self.optimizer.lr

    def whole(self, params: Params) -> Params:
        """All parameters of the network."""
        return {**self.fixed, **self.personal.get("params", {}), **params}

    def model(self, params: Params, buffers: Params) -> tuple[Params, Params]:
        """All parameters and buffers of the network."""
        return self.whole(params), self.personal.get("buffers", {}) | buffers

    def train(self, params: Params, buffers: Params, batch: Batch) -> Output:
        """A forward pass in training."""
        drawn = batch.key if self.network.draws else None
        return self.network(*self.model(params, buffers), batch.x, True, batch.mask, drawn)

    def eval(self, params: Params, buffers: Params, x: Tensor) -> Output:
        """A forward pass in evaluation."""
        return self.network(*self.model(params, buffers), x, False, None, None)

    def classify(self, params: Params, h: Tensor) -> Tensor:
        """Logits [B, C] of features [B, d]."""
        return self.network.classify(self.whole(params), h)

    def activations(self, params: Params, buffers: Params, x: Tensor) -> dict[str, Tensor]:
        """As `Network.activations`."""
        return self.network.activations(*self.model(params, buffers), x)
