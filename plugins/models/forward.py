"""One forward pass, and the interface of a network to the engines: layouts, client axes, gradients,
precision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from fedml_noniid.plugins.core.data import log_softmax
from fedml_noniid.plugins.core.task import Layer, Output
from fedml_noniid.plugins.core.trees import Params

# Precisions of the matrix products and convolutions of local training. tf32 rounds their inputs to
# 11 bits, on a GPU only. bf16 rounds inputs and layers' outputs to 8 bits wherever torch's autocast
# does. Both change a run's bits. Parameters, sums, losses, the server and every evaluation keep
# their own precision.
PRECISIONS = ("float32", "tf32", "bf16")


@dataclass
class Forward:
    """One forward pass: what layers read beside their input, and what they record."""

    params: Params
    buffers: Params
    train: bool
    mask: Tensor | None = None  # [B], 1 for a sample, 0 for padding; None when nothing is padded
    # 0-d, for `plugins.core.randomness`: what dropout draws from in train mode
    key: Tensor | None = None
    drawn: Params = field(
        default_factory=dict
    )  # dropout's factors, where they were drawn before the pass
    record: bool = False
    # no vmap transforms this pass, so it may use kernels that vmap can't transform
    plain: bool = False
    out: Params = field(
        default_factory=dict
    )  # memory for written-out gradients, kept from pass to pass
    # in front of the batch: 1 if parameters, buffers and samples of several clients lie side by
    # side
    axes: int = 0
    activations: dict[str, Tensor] = field(default_factory=dict)
    # input and output of the last ReLU so far, where `record`
    rectified: tuple[Tensor, Tensor] | None = None
    dropping: dict[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # outside of training: dims by dropout
    outputs: int = 0  # numbers that the layers put out, per batch: the engines' measure of memory

    def images(self, x: Tensor) -> Tensor:
        """Images [B, M, H, W] in the fastest layout: on a CPU, the channels of a position lie side
        by side.

        In this layout torch pools ten times as fast, and oneDNN need not reorder images between two
        convolutions.
        """
        if not self.plain or x.device.type != "cpu":
            return x
        x = x.contiguous(memory_format=torch.channels_last)
        # An image of one channel has both layouts at once. Its stride tells torch which one is
        # meant.
        return x.as_strided(x.shape, (x.stride(0), 1, x.stride(2), 1)) if x.shape[1] == 1 else x

    def memory(self, name: str, like: Tensor) -> Tensor:
        """Memory for the gradient of a parameter `like` this: the last pass's, if it has its
        shape."""
        found = self.out.get(name)
        if found is None or found.shape != like.shape:
            with torch.inference_mode(False):  # it is kept for passes outside of this mode
                found = self.out[name] = like.new_empty(like.shape)
        return found

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


# (pass, batch) -> features, logits, and a function from the logits' gradient to the gradient of all
# parameters.
WithGradient = Callable[[Forward, Tensor], tuple[Tensor, Tensor, Callable[[Tensor], Params]]]


@dataclass(frozen=True, eq=False)
class Model(ABC):
    """A network with all that engines need for speed. Implements `plugins.core.task.Network`."""

    name: str
    _: KW_ONLY
    vmappable: bool = True  # whether torch.func.vmap can take it
    # whether samples are the numbers of tokens, on which arithmetic has no meaning
    tokens: bool = False
    frozen: frozenset[str] = frozenset()  # parameters that are given from outside, the same for all
    # whether passes are plain, see `Forward`: one client at a time, without vmap
    plain: bool = False
    precision: str = "float32"  # of training, one of PRECISIONS

    @property
    @abstractmethod
    def n_classes(self) -> int:
        """C."""

    @property
    @abstractmethod
    def feature_size(self) -> int:
        """d, the input of the classifier."""

    @property
    @abstractmethod
    def layers(self) -> tuple[Layer, ...]:
        """The weight layers in forward order, the classifier last."""

    @property
    @abstractmethod
    def dense(self) -> bool:
        """Whether the network takes several clients' trees at once (`Forward.axes`), which pays on
        a CPU.

        It does if it has only matrix products and functions of single numbers or single neurons.
        """

    @property
    @abstractmethod
    def draws(self) -> bool:
        """Whether a pass in training draws from `Forward.key`."""

    @abstractmethod
    def draws_ahead(
        self, params: Params, buffers: Params, x: Tensor, keys: Tensor, batch: int
    ) -> Iterator[Params]:
        """What the passes of a training draw, step by step, leaves [..., B, ...]: the same numbers
        in fewer kernels.

        `x`: a sample [1, ...]; `keys` [..., S]: of the steps, on the host; `batch`: B, the samples
        of the largest step.
        """

    @property
    @abstractmethod
    def with_gradient(self) -> WithGradient | None:
        """The forward pass with its gradient written out; None for networks that leave the gradient
        to autograd."""

    @abstractmethod
    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        """(parameters, buffers), float32 on the CPU."""

    @abstractmethod
    def encode(self, run: Forward, x: Tensor) -> Tensor:
        """[B, ...] -> features [B, d]; new buffers are left in `run.buffers`."""

    @abstractmethod
    def logits(self, run: Forward, h: Tensor) -> Tensor:
        """features [B, d] -> logits [B, C]."""

    def __call__(
        self,
        params: Params,
        buffers: Params,
        x: Tensor,
        train: bool,
        mask: Tensor | None = None,
        key: Tensor | None = None,
        drawn: Params | None = None,
        axes: int = 0,
    ) -> Output:
        """The forward pass of a batch [B, ...]; `axes`: 1 for batches of several clients, [M, B,
        ...].

        `drawn`: a step of `draws_ahead`, in place of `key`.
        """
        run = Forward(
            params, dict(buffers), train, mask, key, drawn or {}, plain=self.plain, axes=axes
        )
        if not (train and self.precision == "bf16"):
            h = self.encode(run, x)
            return Output(h, self.logits(run, h), run.buffers)
        with torch.autocast(x.device.type, torch.bfloat16):
            h = self.encode(run, x)
            logits = self.logits(run, h)
        dtype = next(iter(params.values())).dtype
        return Output(h.to(dtype), logits.to(dtype), run.buffers)

    def classify(self, params: Params, h: Tensor) -> Tensor:
        """Logits [B, C] of features [B, d]."""
        return self.logits(Forward(params, {}, train=False), h)

    def activations(self, params: Params, buffers: Params, x: Tensor) -> dict[str, Tensor]:
        """As `plugins.core.task.Network.activations`."""
        return self._recorded(params, buffers, x)[0].activations

    def pre_activation(self, params: Params, buffers: Params, x: Tensor) -> Tensor | None:
        """As `plugins.core.task.Network.pre_activation`."""
        run, h = self._recorded(params, buffers, x)
        z, rectified = run.rectified or (None, None)
        return z if rectified is h else None

    def _recorded(self, params: Params, buffers: Params, x: Tensor) -> tuple[Forward, Tensor]:
        run = Forward(params, dict(buffers), train=False, record=True, plain=self.plain)
        h = self.encode(run, x)
        self.logits(run, h)
        return run, h

    def outputs(self, params: Params, buffers: Params, x: Tensor) -> int:
        """How many numbers the layers put out for a batch."""
        run = Forward(params, dict(buffers), train=False)
        self.logits(run, self.encode(run, x))
        return run.outputs

    @property
    def written_out(self) -> bool:
        """Whether there is `gradient`."""
        return self.with_gradient is not None and self.precision == "float32"

    def gradient(
        self,
        params: Params,
        buffers: Params,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None = None,
        drawn: Params | None = None,
        out: Params | None = None,
        axes: int = 0,
    ) -> tuple[Params, Tensor, Output]:
        """Gradient of the mean cross-entropy of a batch, cross-entropies of its samples, and
        forward pass in training.

        The gradient equals autograd's to the bit, and is faster. `x` is scratch memory. `out` holds
        the memory of gradients: the next call overwrites what this one returns. `drawn`: as in
        `__call__`.
        """
        forward = self.with_gradient
        assert forward is not None
        out = {} if out is None else out
        run = Forward(
            params,
            dict(buffers),
            True,
            mask,
            None,
            drawn or {},
            plain=self.plain,
            out=out,
            axes=axes,
        )
        h, logits, back = forward(run, x)
        log_p, target = log_softmax(logits), y.reshape(1, -1)
        losses = log_p.gather(0, target).neg_().reshape(y.shape)
        grad = torch.zeros_like(log_p)
        if mask is None:
            grad.scatter_(0, target, -1 / y.shape[-1])
        else:
            mask = mask.to(log_p.dtype)
            fraction = -(mask / mask.sum(-1, keepdim=True).clamp(min=1))
            grad.scatter_(0, target, fraction.reshape(1, -1))
        grad = torch._log_softmax_backward_data(grad, log_p, 0, log_p.dtype)
        return back(grad.t().reshape(logits.shape)), losses, Output(h, logits, run.buffers)
