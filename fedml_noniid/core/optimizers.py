"""Defines optimisers as pure init/step pairs on trees; each equals its namesake in `torch.optim`
(tested).

`step` returns the update to add to the parameters, not the new parameters, so that a method can
scale or mask it (FedNLR's neuron-wise rates) under any optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedml_noniid.core.trees import Params, Tree, leading, norm, scale, tree_map, zeros_like


@dataclass(frozen=True)
class Optimizer:
    """The common part of all optimisers; `given` prepares the gradient before anything else."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    # largest norm of the gradient, as `torch.nn.utils.clip_grad_norm_`; 0: no limit
    clip: float = 0.0

    def init(self, params: Params) -> Tree:
        """The state before the first step."""
        raise NotImplementedError

    def step(self, grads: Params, state: Tree, params: Params) -> tuple[Params, Tree]:
        """(update to add to the parameters, next state)."""
        raise NotImplementedError

    def adjusted(self, grads: Params, params: Params) -> Params:
        """The gradient, clipped, plus weight_decay w."""
        grads = (
            scale((self.clip / (norm(grads) + 1e-6)).clamp(max=1), grads) if self.clip else grads
        )
        return (
            tree_map(lambda g, p: g + self.weight_decay * p, grads, params)
            if self.weight_decay
            else grads
        )


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent: g <- g + wd w; v <- m v + g; update = -lr v."""

    def init(self, params: Params) -> Tree:
        return {"v": zeros_like(params)} if self.momentum else {}

    def step(self, grads: Params, state: Tree, params: Params) -> tuple[Params, Tree]:
        grads = self.adjusted(grads, params)
        if self.momentum:
            grads = tree_map(lambda v, g: self.momentum * v + g, state["v"], grads)
        return scale(-self.lr, grads), {"v": grads} if self.momentum else {}


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015) with torch's defaults beta = (0.9, 0.999), eps = 1e-8 and coupled
    weight decay."""

    momentum: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def init(self, params: Params) -> Tree:
        # The step count is a tensor: clients of one vectorized batch may have taken different
        # numbers of steps.
        count = torch.zeros((), dtype=torch.float64, device=next(iter(params.values())).device)
        return {"m": zeros_like(params), "v": zeros_like(params), "t": count}

    def step(self, grads: Params, state: Tree, params: Params) -> tuple[Params, Tree]:
        grads, t = self.adjusted(grads, params), state["t"] + 1
        m = tree_map(lambda m, g: self.momentum * m + (1 - self.momentum) * g, state["m"], grads)
        v = tree_map(lambda v, g: self.beta2 * v + (1 - self.beta2) * g * g, state["v"], grads)
        c1, c2 = 1 - self.momentum**t, 1 - self.beta2**t

        def moved(m: Tensor, v: Tensor) -> Tensor:
            rate, root = (leading(value, m).to(m.dtype) for value in (self.lr / c1, torch.sqrt(c2)))
            return -rate * m / (torch.sqrt(v) / root + self.eps)

        return tree_map(moved, m, v), {"m": m, "v": v, "t": t}


@dataclass(frozen=True)
class RMSProp(Optimizer):
    """RMSProp with torch's defaults alpha = 0.99, eps = 1e-8; with momentum as in torch."""

    alpha: float = 0.99
    eps: float = 1e-8

    def init(self, params: Params) -> Tree:
        return {"s": zeros_like(params)} | ({"v": zeros_like(params)} if self.momentum else {})

    def step(self, grads: Params, state: Tree, params: Params) -> tuple[Params, Tree]:
        grads = self.adjusted(grads, params)
        s = tree_map(lambda s, g: self.alpha * s + (1 - self.alpha) * g * g, state["s"], grads)
        v = tree_map(lambda g, s: g / (torch.sqrt(s) + self.eps), grads, s)
        if self.momentum:
            v = tree_map(lambda v, d: self.momentum * v + d, state["v"], v)
        return scale(-self.lr, v), {"s": s} | ({"v": v} if self.momentum else {})


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "rmsprop": RMSProp}
