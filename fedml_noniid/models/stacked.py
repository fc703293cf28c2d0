"""Networks that are rows of blocks, with what engines need for speed: layouts, client axes,
gradients that are written out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from fedml_noniid.core.task import Layer, Output
from fedml_noniid.core.trees import Params
from fedml_noniid.models.forward import Forward
from fedml_noniid.models.layers import (
    BatchNorm,
    Block,
    Conv,
    Dropout,
    Flatten,
    Linear,
    MaxPool,
    Order,
    Pull,
    ReLU,
    initialised,
    parts_of,
)
from fedml_noniid.models.layers import Output as Recorded
from fedml_noniid.models.model import Model, Slope

# Numbers that are drawn at a time, over clients and steps. On a CPU they should fit its cache, a
# GPU wants few kernels.
DRAWN_AT_A_TIME = {"cpu": 1 << 16, "cuda": 1 << 25}
# Blocks with a written-out gradient: `traced` returns their output and its `Pull`.
CHAIN = (Linear, Conv, ReLU, MaxPool, Dropout, Recorded, Flatten)
DENSE = (Linear, BatchNorm, ReLU, Recorded, Flatten)  # blocks that know `Forward.axes`


@dataclass(frozen=True, eq=False)
class Stacked(Model):
    """A network that is a row of blocks and a linear classifier."""

    blocks: tuple[Block, ...]
    head: Linear
    # the shape of one sample's factors in each dropout, by the shape of a sample
    _dims: dict[tuple[int, ...], dict[Dropout, tuple[int, ...]]] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def n_classes(self) -> int:
        """C."""
        return self.head.n_out

    @property
    def feature_size(self) -> int:
        """d, the input of the classifier."""
        return self.head.n_in

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The weight layers in forward order, the classifier last."""
        merged: list[Layer] = []
        for block in parts_of((*self.blocks, self.head)):
            if isinstance(block, Linear | Conv):
                merged.append(Layer(block.name, block.names, block.n_out))
            elif isinstance(block, BatchNorm):
                # Its affine pair belongs to the neurons that it normalises.
                merged[-1] = merged[-1]._replace(parameters=merged[-1].parameters + block.names)
        return tuple(merged)

    @cached_property
    def norms(self) -> frozenset[str]:
        """The names of the batch norms."""
        parts = parts_of(self.blocks)
        return frozenset(block.name for block in parts if isinstance(block, BatchNorm))

    @property
    def dense(self) -> bool:
        """Whether the network takes several clients' trees at once (`Forward.axes`), which pays on
        a CPU.

        It does if it has only matrix products and functions of single numbers or single neurons.
        """
        return all(isinstance(block, DENSE) for block in self.blocks)

    @cached_property
    def _dropouts(self) -> tuple[Dropout, ...]:
        return tuple(block for block in parts_of(self.blocks) if isinstance(block, Dropout))

    @property
    def draws(self) -> bool:
        """Whether a pass in training draws from `Forward.key`."""
        return bool(self._dropouts)

    def draws_ahead(
        self, params: Params, buffers: Params, x: Tensor, keys: Tensor, batch: int
    ) -> Iterator[Params]:
        """What the passes of a training draw, step by step, leaves [..., B, ...]: the same numbers
        in fewer kernels.

        `x`: a sample [1, ...]; `keys` [..., S]: of the steps, on the host; `batch`: B, the samples
        of the largest step.
        """
        shape = tuple(x.shape)
        if shape not in self._dims:  # a pass of one sample finds them
            run = Forward(params, dict(buffers), train=False)
            self.encode(run, x)
            self._dims[shape] = {block: run.dropping[block.name] for block in self._dropouts}
        dims = self._dims[shape]
        by_block = {block: block.keys(keys).to(x.device) for block in self._dropouts}  # [..., S]
        numbers = batch * keys[..., 0].numel() * sum(map(prod, dims.values()))
        together = max(1, DRAWN_AT_A_TIME[x.device.type] // max(1, numbers))
        for first in range(0, keys.shape[-1], together):
            steps = range(first, min(first + together, keys.shape[-1]))
            factors = {
                block.name: block.factors(at[..., first : steps.stop], batch, dims[block], x.dtype)
                for block, at in by_block.items()
            }  # [..., steps, B, *dims]
            axis = keys.ndim - 1
            for step in range(len(steps)):
                yield {name: leaf.select(axis, step) for name, leaf in factors.items()}

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        """(parameters, buffers), float32 on the CPU."""
        return initialised((*self.blocks, self.head), generator)

    @cached_property
    def _order(self) -> Order:
        return Order(self.blocks)

    def encode(self, run: Forward, x: Tensor) -> Tensor:
        """[B, ...] -> features [B, d]; new buffers are left in `run.buffers`."""
        return self._order(run, x)

    def logits(self, run: Forward, h: Tensor) -> Tensor:
        """features [B, d] -> logits [B, C]."""
        logits = self.head(run, h)
        run.note(self.head.name, logits)
        return logits

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
        """As `core.task.Network.activations`."""
        run = Forward(params, dict(buffers), train=False, record=True, plain=self.plain)
        self.logits(run, self.encode(run, x))
        return run.activations

    @property
    def written_out(self) -> bool:
        """Whether there is `gradient`."""
        return self._chained and self.precision == "float32"

    @cached_property
    def _chained(self) -> bool:
        return all(isinstance(block, CHAIN) for block in self.blocks)

    def gradient(
        self,
        params: Params,
        buffers: Params,
        x: Tensor,
        slope: Slope,
        mask: Tensor | None = None,
        drawn: Params | None = None,
        out: Params | None = None,
        axes: int = 0,
    ) -> tuple[Params, Tensor, Output]:
        """Gradient of the mean loss of a batch, losses of its samples, and forward pass in
        training.

        The gradient equals autograd's to the bit, and is faster. `x` is scratch memory. `out` holds
        the memory of gradients: the next call overwrites what this one returns. `drawn`: as in
        `__call__`.
        """
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
        h, logits, back = self._traced(run, x)
        grad, losses = slope(logits)
        return back(grad), losses, Output(h, logits, run.buffers)

    @cached_property
    def _first(self) -> int:
        """The place of the first block with parameters: no gradient is needed before it."""
        trained = (
            n for n, block in enumerate(self._order.fast) if isinstance(block, Linear | Conv)
        )
        return next(trained, len(self._order.fast))

    def _traced(self, run: Forward, x: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Params]]:
        """Features, logits, and a function from the logits' gradient to that of all parameters."""
        pulls: list[Pull] = []
        for block in self._order.fast:
            assert isinstance(block, CHAIN)
            x, pull = block.traced(run, x)
            pulls.append(pull)
        logits, last = self.head.traced(run, x)
        first = self._first

        def back(grad: Tensor) -> Params:
            passed, gradients = last(grad, first < len(pulls))
            for n in range(len(pulls) - 1, first - 1, -1):
                assert passed is not None
                passed, of_block = pulls[n](passed, n > first)
                gradients = of_block | gradients
            return gradients

        return x, logits, back
