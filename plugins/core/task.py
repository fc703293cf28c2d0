"""What is learned: a network seen as encoder and head, with its loss and its local optimiser."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from plugins.core.optimizers import Optimizer
from plugins.core.trees import Params, leading

# How matrix products and convolutions of local training are calculated. All but the first have other bits: tf32 rounds
# their inputs to 11 bits, on a GPU only; bf16 to 8 bits, wherever torch's autocast does, and layers' outputs too.
# Parameters, sums, losses, the server and every evaluation stay as they are.
PRECISIONS = ("float32", "tf32", "bf16")


class Layer(NamedTuple):
    """A weight layer: its parameters all have one row (first axis) per neuron or channel."""

    name: str
    parameters: tuple[str, ...]  # weight, bias, and the affine pair of a batch norm that follows
    units: int  # M_l, neurons or channels


@dataclass
class Pass:
    """One forward pass: what layers read beside their input, and what they leave behind."""

    params: Params
    buffers: Params
    train: bool
    mask: Tensor | None = None  # [B], 1 for a sample, 0 for padding; None when nothing is padded
    key: Tensor | None = None  # 0-d, for `plugins.core.noise`: what dropout draws from in train mode
    record: bool = False
    plain: bool = False  # nothing transforms this pass (vmap), so that kernels are open that can't be transformed
    room: Params = field(default_factory=dict)  # tensors that gradients which are written out may be put into
    axes: int = 0  # in front of the batch: 1 where parameters, buffers and samples of several clients lie side by side
    activations: dict[str, Tensor] = field(default_factory=dict)
    rectified: tuple[Tensor, Tensor] | None = None  # input and output of the last ReLU so far, where `record`
    outputs: int = 0  # numbers that the layers put out, per batch: the engines' measure of memory

    def images(self, x: Tensor) -> Tensor:
        """Images [B, M, H, W] in the layout that is fastest to read: on a CPU the channels of a position side by side.

        torch pools them ten times as fast so, and oneDNN need not reorder them between two convolutions.
        """
        if not self.plain or x.device.type != "cpu":
            return x
        x = x.contiguous(memory_format=torch.channels_last)
        # One channel lies in both layouts at once: its stride says to torch which one is meant.
        return x.as_strided(x.shape, (x.stride(0), 1, x.stride(2), 1)) if x.shape[1] == 1 else x

    def activate(self, layer: str, z: Tensor) -> Tensor:
        """ReLU, recorded as the activation of weight layer `layer`."""
        h = torch.relu(z)
        self.note(layer, h)
        if self.record:
            self.rectified = z, h
        return h

    def note(self, layer: str, h: Tensor) -> None:
        if self.record:
            self.activations[layer] = h


# (pass, batch) -> features, logits, and what takes the gradient of the logits to that of all parameters.
WithGradient = Callable[[Pass, Tensor], tuple[Tensor, Tensor, Callable[[Tensor], Params]]]


class Network(Protocol):
    """A model as pure functions of its parameters and buffers. `plugins.models` builds them."""

    @property
    def name(self) -> str: ...

    @property
    def n_classes(self) -> int:
        """C."""
        ...

    @property
    def feature_size(self) -> int:
        """d, the input of the classifier."""
        ...

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The weight layers in forward order, the classifier last."""
        ...

    @property
    def vmappable(self) -> bool:
        """Whether torch.func.vmap can take it."""
        ...

    @property
    def dense(self) -> bool:
        """Made of matrix products and of what acts on each number or each neuron: it takes several clients' trees at
        once (`Pass.axes`), which pays on a CPU.
        """
        ...

    @property
    def with_gradient(self) -> WithGradient | None:
        """The forward pass with its gradient written out; None for networks that leave that to autograd."""
        ...

    @property
    def draws(self) -> bool:
        """Whether a pass in training draws from `Pass.key`."""
        ...

    @property
    def tokens(self) -> bool:
        """Whether samples are the numbers of tokens, with which there is nothing to calculate."""
        ...

    @property
    def frozen(self) -> frozenset[str]:
        """Names of parameters that nobody trains, sends or averages: given from outside, the same for all."""
        ...

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        """(parameters, buffers), float32 on the CPU."""
        ...

    def encode(self, run: Pass, x: Tensor) -> Tensor:
        """[B, ...] -> features [B, d]; new buffers are left in `run.buffers`."""
        ...

    def classify(self, run: Pass, h: Tensor) -> Tensor:
        """features [B, d] -> logits [B, C]."""
        ...


class Output(NamedTuple):
    """What a forward pass yields."""

    features: Tensor  # [B, d], the input of the classifier
    logits: Tensor  # [B, C]
    buffers: Params


@dataclass(frozen=True)
class Task:
    """A network and how a client trains it: mean cross-entropy, one optimiser."""

    network: Network
    optimizer: Optimizer
    fixed: Params = field(default_factory=dict)  # parameters that stay as they are, and so are in no tree elsewhere
    plain: bool = False  # whether passes are plain, see `Pass`: one client at a time, without vmap
    precision: str = "float32"  # of local training, one of PRECISIONS

    def whole(self, params: Params) -> Params:
        """All parameters of the network."""
        return self.fixed | params

    @property
    def lr(self) -> float:
        """eta, the local step size."""
        return self.optimizer.lr

    def forward(
        self,
        params: Params,
        buffers: Params,
        x: Tensor,
        *,
        train: bool,
        mask: Tensor | None = None,
        key: Tensor | None = None,
        axes: int = 0,
    ) -> Output:
        """Features, logits and next buffers for a batch `x` of shape [B, ...]; `key` is what dropout draws from.

        `axes`: 1 for those of several clients, [M, B, ...], which a dense network takes.
        """
        run = Pass(self.whole(params), dict(buffers), train, mask, key, plain=self.plain, axes=axes)
        if not (train and self.precision == "bf16"):
            h = self.network.encode(run, x)
            return Output(h, self.network.classify(run, h), run.buffers)
        with torch.autocast(x.device.type, torch.bfloat16):
            h = self.network.encode(run, x)
            logits = self.network.classify(run, h)
        dtype = next(iter(params.values())).dtype
        return Output(h.to(dtype), logits.to(dtype), run.buffers)

    @property
    def written_out(self) -> bool:
        """Whether there is `gradient`."""
        return self.network.with_gradient is not None and not self.fixed and self.precision == "float32"

    def gradient(
        self,
        params: Params,
        buffers: Params,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None = None,
        key: Tensor | None = None,
        room: Params | None = None,
        axes: int = 0,
    ) -> tuple[Params, Tensor, Output]:
        """Gradient of the mean cross-entropy of a batch, cross-entropies of its samples, and forward pass in training.

        The same gradient as by autograd, to the bit, and quicker. `x` may be overwritten, and
        `room`, an earlier gradient that nobody needs any more: memory that is in the cache.
        """
        forward = self.network.with_gradient
        assert forward is not None
        run = Pass(params, dict(buffers), True, mask, key, plain=self.plain, room=room or {}, axes=axes)
        h, logits, back = forward(run, x)
        log_p, target = _by_class(logits), y.reshape(1, -1)
        losses = log_p.gather(0, target).neg_().reshape(y.shape)
        grad = torch.zeros_like(log_p)
        if mask is None:
            grad.scatter_(0, target, -1 / y.shape[-1])
        else:
            mask = mask.to(log_p.dtype)
            share = -(mask / mask.sum(-1, keepdim=True).clamp(min=1))
            grad.scatter_(0, target, share.reshape(1, -1))
        grad = torch._log_softmax_backward_data(grad, log_p, 0, log_p.dtype)
        return back(grad.t().reshape(logits.shape)), losses, Output(h, logits, run.buffers)

    def classify(self, params: Params, h: Tensor) -> Tensor:
        """Logits [B, C] of features [B, d]."""
        return self.network.classify(Pass(self.whole(params), {}, train=False), h)

    def activations(self, params: Params, buffers: Params, x: Tensor) -> dict[str, Tensor]:
        """Eval-mode output of every weight layer: [B, M] or [B, M, H, W]; after ReLU, logits for the classifier."""
        run = Pass(self.whole(params), dict(buffers), train=False, record=True, plain=self.plain)
        self.network.classify(run, self.network.encode(run, x))
        return run.activations

    def pre_activation(self, params: Params, buffers: Params, x: Tensor) -> Tensor | None:
        """Eval-mode input [B, d] of the ReLU whose output is the features; None where they are no ReLU's output."""
        run = Pass(self.whole(params), dict(buffers), train=False, record=True, plain=self.plain)
        h = self.network.encode(run, x)
        z, rectified = run.rectified or (None, None)
        return z if rectified is h else None


def masked_mean(values: Tensor, mask: Tensor | None, axes: int = 0) -> Tensor:
    """Mean over the rows whose mask is 1; all rows when there is no mask. [B, ...] -> [...].

    `axes`: in front of the batch, of `values` and `mask` [M, B] alike.
    """
    if mask is None:
        return values.mean(axes)
    mask = mask.to(values.dtype)
    # A batch that is padding throughout has no mean; its step is discarded, it only must not make a NaN.
    total: Tensor = (leading(mask, values) * values).sum(axes)
    return total / leading(mask.sum(axes), total).clamp(min=1)


def one_hot(y: Tensor, n_classes: int, dtype: torch.dtype) -> Tensor:
    """1 where a label is the class, [...] -> [..., C]. torch's own looks at the values, which vmap can't under grad."""
    return (y.unsqueeze(-1) == torch.arange(n_classes, device=y.device)).to(dtype)


def cross_entropies(logits: Tensor, y: Tensor) -> Tensor:
    """-log p_y of each sample, [..., C] and [...] -> [...]."""
    return -_by_class(logits).gather(0, y.reshape(1, -1)).reshape(y.shape)


def _by_class(logits: Tensor) -> Tensor:
    """log p, [..., C] -> [C, all the rest].

    Over the last axis, torch's softmax of ten numbers takes six times as long. Three axes, since torch transposes a
    matrix in blocks, which for ten columns takes twice as long.
    """
    by_class = logits.reshape(1, -1, logits.shape[-1]).permute(2, 0, 1).contiguous()
    return torch.log_softmax(by_class.squeeze(1), 0)


def cross_entropy(logits: Tensor, y: Tensor, mask: Tensor | None) -> Tensor:
    """Mean cross-entropy over the samples of a batch, [..., B, C] and [..., B] -> [...]."""
    return masked_mean(cross_entropies(logits, y), mask, y.ndim - 1)
