"""The blocks that networks are made of, as pure functions of a `Forward`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedml_noniid.core.data import masked_mean
from fedml_noniid.core.randomness import fold, uniform
from fedml_noniid.core.trees import Params
from fedml_noniid.models.forward import Forward
from fedml_noniid.models.initial import Initial, as_torch

# From the gradient of a block's output to those of its input (None if it is not needed) and of its
# parameters.
Pull = Callable[[Tensor, bool], tuple[Tensor | None, Params]]

DROPOUT = 0x64726F706F7574  # separates the keys of dropout from other keys of the same step
VARIANCE = ".var"  # ends the name of a batch norm's running variance


class Block:
    """One block of a network.

    No ABC: `isinstance` is slow on those, and it is called in every step.
    """

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        """(parameters, buffers), keys carry the block's name; a block has none unless it says
        so."""
        return {}, {}

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        raise NotImplementedError


@dataclass(frozen=True)
class Weighted(Block):
    """A block with a weight and, in most cases, a bias."""

    name: str

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return f"{self.name}.weight", f"{self.name}.bias"

    def own_params(self, run: Forward) -> list[Tensor]:
        """Its parameters."""
        return [run.params[name] for name in self.names]


@dataclass(frozen=True)
class Linear(Weighted):
    """x W^T + b, [B, n_in] -> [B, n_out], or for several clients [M, B, n_in] -> [M, B, n_out]."""

    n_in: int
    n_out: int
    initial: Initial = as_torch

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        return dict(
            zip(self.names, self.initial(generator, (self.n_out, self.n_in)), strict=True)
        ), {}

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        weight, bias = self.own_params(run)
        if weight.ndim == 2:
            return F.linear(x, weight, bias)
        out: Tensor = _Beside.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # torch has no types for it
        return out

    def traced(self, run: Forward, x: Tensor) -> tuple[Tensor, Pull]:
        of_weight, of_bias = self.names
        weight, bias = run.params[of_weight], run.params[of_bias]
        out = F.linear(x, weight, bias) if weight.ndim == 2 else _beside(x, weight, bias)

        def pull(grad: Tensor, through: bool) -> tuple[Tensor | None, Params]:
            memory = run.memory(of_weight, weight)
            if weight.ndim == 2:
                gradients = (
                    grad @ weight if through else None,
                    torch.mm(grad.t(), x, out=memory),
                    grad.sum(0),
                )
            else:
                gradients = _beside_backward(grad, x, weight, through, memory)
            return gradients[0], {of_weight: gradients[1], of_bias: gradients[2]}

        return out, pull


def _beside(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x_m W_m^T + b_m of clients m side by side."""
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


def _beside_backward(
    grad: Tensor, x: Tensor, weight: Tensor, through: bool, out: Tensor | None = None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Gradients of x (if `through`), of W (in `out`, with the layout of W, which torch's own
    lacks), and of b."""
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
        of_x, of_w, of_b = _beside_backward(
            grad, x.to(low), weight.to(low), ctx.needs_input_grad[0]
        )
        return None if of_x is None else of_x.to(x.dtype), of_w.to(exact), of_b.to(exact)


@dataclass(frozen=True)
class Conv(Weighted):
    """2-d convolution, [B, n_in, H, W] -> [B, n_out, H', W']."""

    n_in: int
    n_out: int
    kernel: int
    padding: int = 0
    stride: int = 1
    bias: bool = True
    initial: Initial = as_torch

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        drawn = self.initial(generator, (self.n_out, self.n_in, self.kernel, self.kernel))
        return dict(zip(self.names, drawn, strict=False)), {}

    @cached_property
    def names(self) -> tuple[str, ...]:
        return (f"{self.name}.weight", f"{self.name}.bias")[: 1 + self.bias]

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        weight, *bias = self.own_params(run)
        return F.conv2d(run.images(x), weight, bias[0] if bias else None, self.stride, self.padding)

    def traced(self, run: Forward, x: Tensor) -> tuple[Tensor, Pull]:
        # The weight is laid out once, for both passes.
        laid_out, weight = run.images(x), run.images(run.params[self.names[0]])

        def pull(grad: Tensor, through: bool) -> tuple[Tensor | None, Params]:
            of_x, *of_params = torch.ops.aten.convolution_backward(
                grad,
                laid_out,
                weight,
                [self.n_out],
                [self.stride] * 2,
                [self.padding] * 2,
                [1, 1],
                False,
                [0, 0],
                1,
                [through, True, self.bias],
            )
            # A gradient can have its input's layout; parameters keep theirs.
            return of_x, {
                name: leaf.contiguous() for name, leaf in zip(self.names, of_params, strict=False)
            }

        bias = run.params[self.names[1]] if self.bias else None
        return F.conv2d(laid_out, weight, bias, self.stride, self.padding), pull


@dataclass(frozen=True)
class BatchNorm(Weighted):
    """Batch normalisation over all axes but the second; momentum 0.1, eps 1e-5, unbiased running
    variance.

    Written out where torch's kernel can't be called: padded samples must not count, and vmap can't
    change running statistics in place. Equals `torch.nn.BatchNorm1d/2d` for batches without
    padding. torch refuses a batch of one value per channel; here such a batch leaves the running
    variance's unbiased factor at 1.
    """

    n: int
    momentum: float = 0.1
    eps: float = 1e-5

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        zeros, ones = torch.zeros(self.n), torch.ones(self.n)
        params, buffers = (ones, zeros), (zeros.clone(), ones.clone())
        return dict(zip(self.names, params, strict=True)), dict(
            zip(self.running, buffers, strict=True)
        )

    @cached_property
    def running(self) -> tuple[str, str]:
        """Names of the running mean and variance."""
        return f"{self.name}.mean", f"{self.name}{VARIANCE}"

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        weight, bias = self.own_params(run)
        mean, var = running = [run.buffers[name] for name in self.running]
        if run.plain and run.mask is None and x.numel() > self.n:
            if run.train:
                mean, var = mean.clone(), var.clone()  # the kernel overwrites them
                run.buffers |= zip(self.running, (mean, var), strict=True)
            return F.batch_norm(x, mean, var, weight, bias, run.train, self.momentum, self.eps)
        if run.train:
            mean, var, bessel = self._moments(run, x)
            # The running statistics are data, not a path for gradients.
            moments, keep = (mean.detach(), (var * bessel).detach()), 1 - self.momentum
            for name, old, now in zip(self.running, running, moments, strict=True):
                run.buffers[name] = keep * old + self.momentum * now
        factor = weight * torch.rsqrt(var + self.eps)
        shift = bias - mean * factor
        return x * self._beside(run, factor, x) + self._beside(run, shift, x)

    def _beside(self, run: Forward, values: Tensor, x: Tensor) -> Tensor:
        """Values per neuron, [..., n], as they lie in `x` [..., B, n, ...]."""
        return values.unsqueeze(-2).reshape(
            *values.shape[:-1], 1, self.n, *[1] * (x.ndim - run.axes - 2)
        )

    def _moments(self, run: Forward, x: Tensor) -> tuple[Tensor, Tensor, float | Tensor]:
        """Mean and biased variance per channel [..., n], and the factor n / (n - 1) that makes the
        latter unbiased."""
        space = tuple(range(run.axes + 2, x.ndim))
        positions = math.prod(x.shape[run.axes + 2 :])

        def over_batch(values: Tensor) -> Tensor:
            """[..., B, n, ...] -> [..., n]."""
            return masked_mean(values.mean(space) if space else values, run.mask, run.axes)

        mean = over_batch(x)
        var = over_batch((x - self._beside(run, mean, x)).square())
        if run.mask is None:
            # A Python number: a tensor would be copied to the device in every step.
            count = x.shape[run.axes] * positions
            return mean, var, count / max(count - 1, 1)
        counted = run.mask.to(x.dtype).sum(-1, keepdim=True) * positions
        return mean, var, counted / (counted - 1).clamp(min=1)


@dataclass(frozen=True)
class ReLU(Block):
    """max(0, x), recorded as the activation of weight layer `layer`."""

    layer: str

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        return run.activate(self.layer, x)

    def traced(self, run: Forward, x: Tensor) -> tuple[Tensor, Pull]:
        # In place: no block before it needs its own output, none behind it the gradient of its
        # input.
        h = torch.relu_(x)

        def pull(grad: Tensor, through: bool) -> tuple[Tensor | None, Params]:
            if grad.stride() == h.stride():
                return torch.ops.aten.threshold_backward.grad_input(grad, h, 0, grad_input=grad), {}
            return torch.ops.aten.threshold_backward(
                grad, h, 0
            ), {}  # in the layout of `h`, as convolutions need it

        return h, pull


@dataclass(frozen=True)
class Output(Block):
    """Returns its input and records it as the activations of `layer` (a layer without ReLU)."""

    layer: str

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        run.note(self.layer, x)
        return x

    def traced(self, run: Forward, x: Tensor) -> tuple[Tensor, Pull]:
        return x, lambda grad, through: (grad, {})


@dataclass(frozen=True)
class MaxPool(Block):
    """Max pooling with stride equal to the window."""

    size: int = 2

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        return F.max_pool2d(run.images(x), self.size)

    def traced(self, run: Forward, x: Tensor) -> tuple[Tensor, Pull]:
        laid_out, window = run.images(x), [self.size] * 2
        h, indices = torch.ops.aten.max_pool2d_with_indices(laid_out, window, window)

        def pull(grad: Tensor, through: bool) -> tuple[Tensor | None, Params]:
            arguments = grad, laid_out, window, window, [0, 0], [1, 1], False, indices
            # In the memory of its input, of which it reads the shape only. No block before it needs
            # its own output: `Order` puts a ReLU, the only block that does, behind the pool.
            return torch.ops.aten.max_pool2d_with_indices_backward.grad_input(
                *arguments, grad_input=laid_out
            ), {}

        return h, pull


@dataclass(frozen=True)
class Flatten(Block):
    """[..., B, ...] -> [..., B, product of the rest]."""

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        return x.flatten(run.axes + 1)

    def traced(self, run: Forward, x: Tensor) -> tuple[Tensor, Pull]:
        def pull(grad: Tensor, through: bool) -> tuple[Tensor | None, Params]:
            gradients = grad.reshape(x.shape)
            # In the layout of images: in another one, a ReLU takes twice the time and a pool six
            # times.
            return run.images(gradients) if x.ndim - run.axes == 4 else gradients, {}

        return x.flatten(run.axes + 1), pull


@dataclass(frozen=True)
class GlobalAverage(Block):
    """Mean over positions, [B, M, H, W] -> [B, M]."""

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        return x.mean((2, 3))


@dataclass(frozen=True)
class Dropout(Block):
    """In training sets numbers to 0 with probability `p` and divides the others by 1 - p; otherwise
    the identity.

    The key of the pass, this block's `number` and the position in the batch decide what is dropped.
    Padding stands behind the samples, so it changes nothing.
    """

    number: int  # its own in the network
    p: float
    channels: bool = False  # whole channels, as `torch.nn.Dropout2d`

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        if not run.train:
            run.dropping[self.name] = self.dims(x)
            return x
        return x * self._factors(run, x)

    def traced(self, run: Forward, x: Tensor) -> tuple[Tensor, Pull]:
        factors = self._factors(run, x)
        return x * factors, lambda grad, through: (grad * factors, {})

    def _factors(self, run: Forward, x: Tensor) -> Tensor:
        """The factors of the input: 0 where it is dropped, 1 / (1 - p) elsewhere."""
        if run.drawn:
            return run.drawn[self.name][: len(x)]
        if run.key is None:
            raise ValueError(
                f"dropout {self.number}: a pass in train mode needs a key to draw what is "
                "dropped, got none"
            )
        return self.factors(self.keys(run.key), len(x), self.dims(x), x.dtype)

    @property
    def name(self) -> str:
        return f"dropout{self.number}"

    def keys(self, keys: Tensor) -> Tensor:
        """This block's own keys, from those of steps."""
        return fold(fold(keys, DROPOUT), self.number)

    def dims(self, x: Tensor) -> tuple[int, ...]:
        """The shape of one sample's factors."""
        return (x.shape[1], *[1] * (x.ndim - 2)) if self.channels else tuple(x.shape[1:])

    def factors(
        self, keys: Tensor, batch: int, dims: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """The factors [..., B, *dims] of the keys [...]."""
        return (uniform(keys, batch, *dims) >= self.p).to(dtype).div_(1 - self.p)


class Order:
    """Blocks one after the other; a ReLU before max pools runs after them, where it has less to do.

    Values and gradients are the same: a window with a positive maximum has the same maximum in both
    orders, and no gradient passes any other window. A pass that records keeps the order, because a
    ReLU records the whole image.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.recorded = tuple(blocks)
        self.fast: list[Block] = []
        for block in blocks:
            at = len(self.fast)
            while isinstance(block, MaxPool) and at and isinstance(self.fast[at - 1], ReLU):
                at -= 1
            self.fast.insert(at, block)

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        for block in self.recorded if run.record else self.fast:
            x = block(run, x)
        return x


@dataclass(frozen=True)
class Residual(Block):
    """ReLU(body(x) + shortcut(x)) (He, Zhang, Ren, Sun 2016), the activation of weight layer
    `layer`, the body's last.

    An empty shortcut is the identity.
    """

    layer: str
    body: tuple[Block, ...]
    shortcut: tuple[Block, ...] = ()

    def init(self, generator: torch.Generator) -> tuple[Params, Params]:
        return initialised((*self.body, *self.shortcut), generator)

    @cached_property
    def _order(self) -> tuple[Order, Order]:
        return Order(self.body), Order(self.shortcut)

    def __call__(self, run: Forward, x: Tensor) -> Tensor:
        body, shortcut = self._order
        return run.activate(self.layer, body(run, x) + shortcut(run, x))


def initialised(blocks: Iterable[Block], generator: torch.Generator) -> tuple[Params, Params]:
    params: Params = {}
    buffers: Params = {}
    for block in blocks:
        p, b = block.init(generator)
        params |= p
        buffers |= b
    return params, buffers


def parts_of(blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks in forward order, each residual block replaced by its parts."""
    for block in blocks:
        yield from (
            parts_of((*block.body, *block.shortcut)) if isinstance(block, Residual) else (block,)
        )
