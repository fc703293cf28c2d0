"""Local optimisers as pure init/step pairs on trees; each equals its namesake in `torch.optim` (tested).

`step` returns the update to add to the parameters, not the new parameters, so that a method can scale or mask it
(FedNLR's neuron-wise rates, a frozen head) whatever the optimiser.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from plugins.core.errors import UserError, nearest
from plugins.core.trees import Params, Tree, leading, tree_map, zeros_like


class Optimizer(Protocol):
    """What local training needs of an optimiser."""

    @property
    def lr(self) -> float: ...

    @property
    def momentum(self) -> float: ...

    @property
    def weight_decay(self) -> float: ...

    @property
    def rate(self) -> float | None:
        """eta where the update is -eta times the gradient and nothing else, so that it can be added at once."""
        ...

    def init(self, params: Params) -> Tree:
        """The state before the first step."""
        ...

    def step(self, grads: Params, state: Tree, params: Params) -> tuple[Params, Tree]:
        """(update to add to the parameters, next state). The gradient may be overwritten, and is by the next."""
        ...


@dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent: g <- g + wd w; v <- m v + g; update = -lr v."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    @property
    def rate(self) -> float | None:
        return None if self.momentum or self.weight_decay else self.lr

    def init(self, params: Params) -> Tree:
        return {"v": zeros_like(params)} if self.momentum else {}

    def step(self, grads: Params, state: Tree, params: Params) -> tuple[Params, Tree]:
        grads = _decayed(grads, params, self.weight_decay)
        if self.momentum:
            grads = tree_map(lambda v, g: self.momentum * v + g, state["v"], grads)
            return tree_map(lambda g: -self.lr * g, grads), {"v": grads}
        return tree_map(lambda g: g.mul_(-self.lr), grads), state


@dataclass(frozen=True)
class Adam:
    """Adam (Kingma and Ba 2015) with torch's defaults beta = (0.9, 0.999), eps = 1e-8 and coupled weight decay."""

    lr: float
    momentum: float = 0.9
    weight_decay: float = 0.0
    beta2: float = 0.999
    eps: float = 1e-8
    rate: None = field(default=None, init=False)

    def init(self, params: Params) -> Tree:
        # The step count is a tensor: clients of one vectorized batch may have taken different numbers of steps.
        some = next(iter(params.values()))
        return {
            "m": zeros_like(params),
            "v": zeros_like(params),
            "t": torch.zeros((), dtype=torch.float64, device=some.device),
        }

    def step(self, grads: Params, state: Tree, params: Params) -> tuple[Params, Tree]:
        grads = _decayed(grads, params, self.weight_decay)
        t = state["t"] + 1
        m = tree_map(lambda m, g: self.momentum * m + (1 - self.momentum) * g, state["m"], grads)
        v = tree_map(lambda v, g: self.beta2 * v + (1 - self.beta2) * g * g, state["v"], grads)
        c1, c2 = 1 - self.momentum**t, 1 - self.beta2**t

        def moved(m: Tensor, v: Tensor) -> Tensor:
            rate, root = (leading(value, m).to(m.dtype) for value in (self.lr / c1, torch.sqrt(c2)))
            return -rate * m / (torch.sqrt(v) / root + self.eps)

        return tree_map(moved, m, v), {"m": m, "v": v, "t": t}


@dataclass(frozen=True)
class RMSProp:
    """RMSProp with torch's defaults alpha = 0.99, eps = 1e-8; with momentum as in torch."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    alpha: float = 0.99
    eps: float = 1e-8
    rate: None = field(default=None, init=False)

    def init(self, params: Params) -> Tree:
        state: Tree = {"s": zeros_like(params)}
        return state | ({"v": zeros_like(params)} if self.momentum else {})

    def step(self, grads: Params, state: Tree, params: Params) -> tuple[Params, Tree]:
        grads = _decayed(grads, params, self.weight_decay)
        s = tree_map(lambda s, g: self.alpha * s + (1 - self.alpha) * g * g, state["s"], grads)
        step = tree_map(lambda g, s: g / (torch.sqrt(s) + self.eps), grads, s)
        if not self.momentum:
            return tree_map(lambda d: -self.lr * d, step), {"s": s}
        v = tree_map(lambda v, d: self.momentum * v + d, state["v"], step)
        return tree_map(lambda v: -self.lr * v, v), {"s": s, "v": v}


OPTIMIZERS: dict[str, type[SGD] | type[Adam] | type[RMSProp]] = {"sgd": SGD, "adam": Adam, "rmsprop": RMSProp}


def build(name: str, lr: float, momentum: float | None = None, weight_decay: float = 0.0) -> Optimizer:
    """The optimiser `name`; `momentum=None` means the optimiser's own default. UserError for an unknown name."""
    if name not in OPTIMIZERS:
        raise UserError(f"optimizer {name!r} is unknown{nearest(name, OPTIMIZERS)}; allowed: {', '.join(OPTIMIZERS)}")
    kind = OPTIMIZERS[name]
    return kind(lr, weight_decay=weight_decay) if momentum is None else kind(lr, momentum, weight_decay)


def _decayed(grads: Params, params: Params, weight_decay: float) -> Params:
    return tree_map(lambda g, p: g + weight_decay * p, grads, params) if weight_decay else grads
