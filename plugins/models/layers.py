"""The blocks that networks are made of, as pure functions of a `Forward`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from plugins.core.data import masked_mean
from plugins.core.randomness import fold, uniform
from plugins.core.task import Layer
from plugins.core.trees import Params
from plugins.models.forward import Forward, Model, WithGradient
from plugins.models.initial import Initial, as_torch

# Takes the gradient of a block's output to that of its input (None if nobody wants it) and of its parameters.
Pull = Callable[[Tensor, bool], tuple[Tensor | None, Params]]

DROPOUT = 0x64726F706F7574  # separates the keys of dropout from all others that belong to a step's key


class Block(Protocol):
    """One block of a network."""

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        """(parameters, buffers), keys carry the block's name."""
        ...

    def __call__(self, run: Forward, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Linear:
    """x W^T + b, [B, n_in] -> [B, n_out], or for several clients [M, B, n_in] -> [M, B, n_out]."""

    name: str
    n_in: int
    n_out: int
    initial: Initial = as_torch

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        weight, bias = self.initial(generator, (self.n_out, self.n_in))
        return {f"{self.name}.weight": weight, f"{self.name}.bias": bias}, {}

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        weight, bias = self._of(run)
        if weight.ndim == 2:
            return F.linear(x, weight, bias)
        out: Tensor = _Beside.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # torch has no types for it
        return out

    def traced(self, run: Forward, x: Tensor) -> tuple[Tensor, Pull]:
        weight, bias = self._of(run)
        out = F.linear(x, weight, bias) if weight.ndim == 2 else _beside(x, weight, bias)

        def pull(grad: Tensor, through: bool) -> tuple[Tensor | None, Params]:
            memory = run.out.get(f"{self.name}.weight")
            if weight.ndim == 2:
                found = grad @ weight if through else None, torch.mm(grad.t(), x, out=memory), grad.sum(0)
            else:
                found = _beside_backward(grad, x, weight, through, memory)
            return found[0], {f"{self.name}.weight": found[1], f"{self.name}.bias": found[2]}

        return out, pull

    def _of(self, run: Forward) -> tuple[Tensor, Tensor]:
        return run.params[f"{self.name}.weight"], run.params[f"{self.name}.bias"]


def _beside(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x_m W_m^T + b_m of clients m side by side."""
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


def _beside_backward(
    grad: Tensor, x: Tensor, weight: Tensor, through: bool, out: Tensor | None = None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of x, if `through`, of W, which lies as W does (torch's own does not), in `out`, and of b."""
    of_x = torch.bmm(grad, weight) if through else None
    return of_x, torch.bmm(grad.transpose(1, 2), x, out=out), grad.sum(1)


class _Beside(torch.autograd.Function):
    """`_beside` for autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _beside(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        exact, low = weight.dtype, grad.dtype  # differ under autocast
        of_x, of_w, of_b = _beside_backward(grad, x.to(low), weight.to(low), ctx.needs_input_grad[0])
        return None if of_x is None else of_x.to(x.dtype), of_w.to(exact), of_b.to(exact)


@dataclass(frozen=True)
class Conv:
    """2-d convolution, [B, n_in, H, W] -> [B, n_out, H', W']."""

    name: str
    n_in: int
    n_out: int
    kernel: int
    padding: int = 0
    stride: int = 1
    bias: bool = True
    initial: Initial = as_torch

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        weight, bias = self.initial(generator, (self.n_out, self.n_in, self.kernel, self.kernel))
        params = {f"{self.name}.weight": weight}
        return params | ({f"{self.name}.bias": bias} if self.bias else {}), {}

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        bias = run.params[f"{self.name}.bias"] if self.bias else None
        return F.conv2d(
            run.images(x), run.params[f"{self.name}.weight"], bias, stride=self.stride, padding=self.padding
        )

    def traced(self, run: Forward, x: Tensor) -> tuple[Tensor, Pull]:
        seen, weight = run.images(x), run.params[f"{self.name}.weight"]
        names = [f"{self.name}.weight", f"{self.name}.bias"][: 1 + self.bias]

        def pull(grad: Tensor, through: bool) -> tuple[Tensor | None, Params]:
            of_x, *own = torch.ops.aten.convolution_backward(
                grad, seen, weight, [self.n_out], [self.stride] * 2, [self.padding] * 2, [1, 1], False, [0, 0], 1,
                [through, True, self.bias],
            )  # fmt: skip
            # It can come in its input's layout; parameters stay as they are.
            return of_x, {name: leaf.contiguous() for name, leaf in zip(names, own, strict=False)}

        return self(run, seen), pull


@dataclass(frozen=True)
class BatchNorm:
    """Batch normalisation over all axes but the second; momentum 0.1, eps 1e-5, unbiased running variance.

    Written out where torch's kernel can't be called: padded samples of a masked batch must not count, and vmap takes
    no running statistics that are changed in place. Equals `torch.nn.BatchNorm1d/2d` where nothing is padded; a batch
    of one value per channel, which torch refuses, leaves the running variance's unbiased factor at 1.
    """

    name: str
    n: int
    momentum: float = 0.1
    eps: float = 1e-5

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        params = {f"{self.name}.weight": torch.ones(self.n), f"{self.name}.bias": torch.zeros(self.n)}
        return params, {f"{self.name}.mean": torch.zeros(self.n), f"{self.name}.var": torch.ones(self.n)}

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        if run.plain and run.mask is None and x.numel() > self.n:
            return self._kernel(run, x)
        if run.train:
            mean, var, bessel = self._moments(run, x)
            # The running statistics are data, not a path for gradients.
            unbiased = (var * bessel).detach()
            keep = 1 - self.momentum
            for key, now in (("mean", mean.detach()), ("var", unbiased)):
                run.buffers[f"{self.name}.{key}"] = keep * run.buffers[f"{self.name}.{key}"] + self.momentum * now
        else:
            mean, var = run.buffers[f"{self.name}.mean"], run.buffers[f"{self.name}.var"]
        factor = run.params[f"{self.name}.weight"] * torch.rsqrt(var + self.eps)
        shift = run.params[f"{self.name}.bias"] - mean * factor
        return x * self._beside(run, factor, x) + self._beside(run, shift, x)

    def _beside(self, run: Forward, values: Tensor, x: Tensor) -> Tensor:
        """Values per neuron, [..., n], as they lie in `x` [..., B, n, ...]."""
        return values.unsqueeze(-2).reshape(*values.shape[:-1], 1, self.n, *[1] * (x.ndim - run.axes - 2))

    def _kernel(self, run: Forward, x: Tensor) -> Tensor:
        params = run.params[f"{self.name}.weight"], run.params[f"{self.name}.bias"]
        mean, var = run.buffers[f"{self.name}.mean"], run.buffers[f"{self.name}.var"]
        if run.train:
            mean, var = mean.clone(), var.clone()  # the kernel overwrites them
            run.buffers[f"{self.name}.mean"], run.buffers[f"{self.name}.var"] = mean, var
        return F.batch_norm(x, mean, var, *params, run.train, self.momentum, self.eps)

    def _moments(self, run: Forward, x: Tensor) -> tuple[Tensor, Tensor, float | Tensor]:
        """Mean and biased variance per channel [..., n], and the factor n / (n - 1) that makes the latter unbiased."""
        space = tuple(range(run.axes + 2, x.ndim))
        positions = math.prod(x.shape[run.axes + 2 :])

        def over_batch(values: Tensor) -> Tensor:
            """[..., B, n, ...] -> [..., n]."""
            return masked_mean(values.mean(space) if space else values, run.mask, run.axes)

        mean = over_batch(x)
        var = over_batch((x - self._beside(run, mean, x)).square())
        if run.mask is None:
            # A number of the host: a tensor made of it would be copied to the device in every step.
            count = x.shape[run.axes] * positions
            return mean, var, count / max(count - 1, 1)
        counted = run.mask.to(x.dtype).sum(-1, keepdim=True) * positions
        return mean, var, counted / (counted - 1).clamp(min=1)


@dataclass(frozen=True)
class ReLU:
    """max(0, x), recorded as the activation of weight layer `of`."""

    of: str

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        return {}, {}

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        return run.activate(self.of, x)

    def traced(self, run: Forward, x: Tensor) -> tuple[Tensor, Pull]:
        # In place: no block before it needs its own output, none behind it the gradient of its input.
        h = torch.relu_(x)

        def pull(grad: Tensor, through: bool) -> tuple[Tensor | None, Params]:
            if grad.stride() == h.stride():
                return torch.ops.aten.threshold_backward.grad_input(grad, h, 0, grad_input=grad), {}
            return torch.ops.aten.threshold_backward(grad, h, 0), {}  # laid out as `h`, which convolutions go on with

        return h, pull


@dataclass(frozen=True)
class Output:
    """The input as it is, recorded as the output of weight layer `of`, which no ReLU follows."""

    of: str

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        return {}, {}

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        run.note(self.of, x)
        return x

    def traced(self, run: Forward, x: Tensor) -> tuple[Tensor, Pull]:
        return x, lambda grad, through: (grad, {})


@dataclass(frozen=True)
class MaxPool:
    """Max pooling with stride equal to the window."""

    size: int = 2

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        return {}, {}

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        return F.max_pool2d(run.images(x), self.size)

    def traced(self, run: Forward, x: Tensor) -> tuple[Tensor, Pull]:
        seen, window = run.images(x), [self.size] * 2
        h, indices = torch.ops.aten.max_pool2d_with_indices(seen, window, window)

        def pull(grad: Tensor, through: bool) -> tuple[Tensor | None, Params]:
            given = grad, seen, window, window, [0, 0], [1, 1], False, indices
            return torch.ops.aten.max_pool2d_with_indices_backward(*given), {}

        return h, pull


@dataclass(frozen=True)
class Flatten:
    """[..., B, ...] -> [..., B, product of the rest]."""

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        return {}, {}

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        return x.flatten(run.axes + 1)

    def traced(self, run: Forward, x: Tensor) -> tuple[Tensor, Pull]:
        return x.flatten(run.axes + 1), lambda grad, through: (grad.reshape(x.shape), {})


@dataclass(frozen=True)
class GlobalAverage:
    """Mean over positions, [B, M, H, W] -> [B, M]."""

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        return {}, {}

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        return x.mean((2, 3))


@dataclass(frozen=True)
class Dropout:
    """In training sets numbers to 0 with probability `p` and divides the others by 1 - p; otherwise the identity.

    What is dropped follows from the key of the pass, this block's `number`, and the position in the batch: padding,
    which stands behind the samples, changes nothing.
    """

    number: int  # its own in the network
    p: float
    channels: bool = False  # whole channels, as `torch.nn.Dropout2d`

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        return {}, {}

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        return x * self._kept(run, x) if run.train else x

    def traced(self, run: Forward, x: Tensor) -> tuple[Tensor, Pull]:
        kept = self._kept(run, x)
        return x * kept, lambda grad, through: (grad * kept, {})

    def _kept(self, run: Forward, x: Tensor) -> Tensor:
        """0 for what is dropped, and what all else is multiplied by."""
        if run.key is None:
            raise ValueError(
                f"dropout {self.number}: a pass in train mode needs a key to draw what is dropped, got none"
            )
        shape = (*x.shape[:2], *[1] * (x.ndim - 2)) if self.channels else x.shape
        kept = uniform(fold(fold(run.key, DROPOUT), self.number), *shape) >= self.p
        return kept.to(x.dtype) / (1 - self.p)


class Order:
    """Blocks one after the other, each ReLU before a max pool behind it, where it has less to do.

    The same values, and the same gradients: where the greatest of a window is positive, it is the same one, and
    elsewhere nothing passes. What a ReLU records has to be of the whole image, though.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.recorded, self.fast = tuple(blocks), list(blocks)
        for i, (first, second) in enumerate(pairwise(blocks)):
            if isinstance(first, ReLU) and isinstance(second, MaxPool):
                self.fast[i : i + 2] = second, first

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        for block in self.recorded if run.record else self.fast:
            x = block(run, x)
            run.outputs += x.numel()
        return x


@dataclass(frozen=True)
class Residual:
    """ReLU(body(x) + shortcut(x)) (He, Zhang, Ren, Sun 2016), the activation of weight layer `of`, the body's last.

    An empty shortcut is the identity.
    """

    of: str
    body: tuple[Block, ...]
    shortcut: tuple[Block, ...] = ()

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        return _initialised((*self.body, *self.shortcut), generator)

    @cached_property
    def _order(self) -> tuple[Order, Order]:
        return Order(self.body), Order(self.shortcut)

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        body, shortcut = self._order
        return run.activate(self.of, body(run, x) + shortcut(run, x))


# Blocks whose gradient is written out: `traced` gives their output, and what takes its gradient to that of their input.
CHAIN = (Linear, Conv, ReLU, MaxPool, Dropout, Output, Flatten)
DENSE = (Linear, BatchNorm, ReLU, Output, Flatten)  # blocks that know `Forward.axes`


def _initialised(blocks: Iterable[Block], generator: torch.Generator) -> tuple[Params, Params]:
    params: Params = {}
    buffers: Params = {}
    for block in blocks:
        p, b = block.init(generator)
        params |= p
        buffers |= b
    return params, buffers


def _parts(blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks in forward order, each residual one replaced by what it is made of."""
    for block in blocks:
        yield from _parts((*block.body, *block.shortcut)) if isinstance(block, Residual) else (block,)


@dataclass(frozen=True)
class Stacked(Model):
    """A network that is a row of blocks and a linear classifier."""

    name: str
    blocks: tuple[Block, ...]
    head: Linear
    vmappable: bool = True
    tokens: bool = False
    frozen: frozenset[str] = frozenset()
    plain: bool = False
    precision: str = "float32"

    @property
    def n_classes(self) -> int:
        return self.head.n_out

    @property
    def feature_size(self) -> int:
        return self.head.n_in

    @property
    def dense(self) -> bool:
        return all(isinstance(block, DENSE) for block in self.blocks)

    @cached_property
    def draws(self) -> bool:
        return any(isinstance(block, Dropout) for block in _parts(self.blocks))

    @property
    def layers(self) -> tuple[Layer, ...]:
        found: list[Layer] = []
        for block in _parts((*self.blocks, self.head)):
            if isinstance(block, Linear):
                found.append(Layer(block.name, (f"{block.name}.weight", f"{block.name}.bias"), block.n_out))
            elif isinstance(block, Conv):
                own = (f"{block.name}.weight", *((f"{block.name}.bias",) if block.bias else ()))
                found.append(Layer(block.name, own, block.n_out))
            elif isinstance(block, BatchNorm):
                # A batch norm's affine pair belongs to the neurons that it normalises.
                last = found[-1]
                affine = (f"{block.name}.weight", f"{block.name}.bias")
                found[-1] = last._replace(parameters=last.parameters + affine)
        return tuple(found)

    @cached_property
    def with_gradient(self) -> WithGradient | None:
        return self._with_gradient if all(isinstance(block, CHAIN) for block in self.blocks) else None

    @cached_property
    def _order(self) -> Order:
        return Order(self.blocks)

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        return _initialised((*self.blocks, self.head), generator)

    def _with_gradient(self, run: Forward, x: Tensor) -> tuple[Tensor, Tensor, Callable[[Tensor], Params]]:
        pulls: list[Pull] = []
        for block in self._order.fast:
            assert isinstance(block, CHAIN)
            x, pull = block.traced(run, x)
            pulls.append(pull)
        logits, last = self.head.traced(run, x)
        # Nobody asks for the gradient of what lies before the first parameters.
        trained = (n for n, block in enumerate(self._order.fast) if isinstance(block, Linear | Conv))
        first = next(trained, len(pulls))

        def back(grad: Tensor) -> Params:
            passed, found = last(grad, first < len(pulls))
            for n in range(len(pulls) - 1, first - 1, -1):
                assert passed is not None
                passed, own = pulls[n](passed, n > first)
                found = own | found
            return found

        return x, logits, back

    def encode(self, run: Forward, x: Tensor) -> Tensor:
        return self._order(run, x)

    def logits(self, run: Forward, h: Tensor) -> Tensor:
        logits = self.head(run, h)
        run.outputs += logits.numel()
        run.note(self.head.name, logits)
        return logits
