"""Local training, for one client or for many at once, whose trees then have an axis [M] in front of every leaf.

Nothing here looks at that axis: what a network or a component's hook does with the trees of one client is handed in as
a function that takes those of all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from plugins.core.component import Batch, Plan, Trace, ValueAndGrad
from plugins.core.noise import fold
from plugins.core.optimizers import Optimizer
from plugins.core.task import Output, cross_entropy, masked_mean
from plugins.core.trees import Params, Tree, detach, select, tree_map

Forward = Callable[[Params, Params, Batch], Output]
# (parameters, buffers, batch, the last gradient) -> gradient of the mean cross-entropy, in the last one's place, and
# what `autograd` gives beside it, but for the loss: that of each sample, [..., B].
Written = Callable[[Params, Params, Batch, Params], tuple[Params, Tree]]


def autograd(loss: Callable[[Params], tuple[Tensor, Tree]], params: Params) -> tuple[Params, Tree]:
    """(gradient, detached aux) by the autograd tape; of several losses [M] each depends on its own rows only."""
    with torch.enable_grad():
        watched = {key: value.detach().requires_grad_() for key, value in params.items()}
        value, aux = loss(watched)
        grads = torch.autograd.grad(value.sum(), list(watched.values()))
    # A convolution's gradient can come in its input's layout; parameters stay as they are.
    return {key: grad.contiguous() for key, grad in zip(watched, grads, strict=True)}, detach(aux)


def functional(loss: Callable[[Params], tuple[Tensor, Tree]], params: Params) -> tuple[Params, Tree]:
    """(gradient, aux) by torch.func: the way that vmap can batch."""
    grads, aux = torch.func.grad(loss, has_aux=True)(params)
    return grads, aux


def aux_of(loss: Tensor, out: Output, features: bool) -> Tree:
    """What a step leaves beside its gradient."""
    aux = {"loss": loss, "buffers": out.buffers}
    return aux | {"features": out.features} if features else aux


class Hooks(NamedTuple):
    """What methods add to local training; None where nobody does."""

    penalty: Callable[[Params, Output, Batch], Tensor | None] | None = None  # terms of the loss
    adjust_logits: Callable[[Tensor, Params], Tensor] | None = None
    correct_gradient: Callable[[Params, Params], Params] | None = None  # (gradient, parameters)
    correct_update: Callable[[Params, Params], Params] | None = None  # (the update or a multiple of it, parameters)


def local_steps(
    forward: Forward,
    optimizer: Optimizer,
    params: Params,
    buffers: Params,
    state: Tree,
    steps: Plan,
    key: Tensor,
    grad: ValueAndGrad,
    hooks: Hooks = Hooks(),  # noqa: B008, immutable
    written: Written | None = None,
    into: Params | None = None,
    draws: bool = True,
) -> Trace:
    """Runs the batches of `steps` from `params` and returns their trace.

    `state`: the optimiser's. `key`: of the client, or of each [M]. `written`: takes the place of `forward` and `grad`
    where no hook changes the loss. `into`: where the parameters may be put. `draws`: whether batches have keys.
    """
    written = written if hooks.penalty is None and hooks.adjust_logits is None else None
    start = params
    some = next(iter(params.values()))
    zero = torch.zeros(key.shape, dtype=some.dtype, device=some.device)
    losses: list[Tensor] = []
    seen, last = zero, steps.last
    features: Tensor | None = None
    gradient: Params = {}
    keys: Sequence[Tensor | None] = (None,) * len(steps)
    if draws:  # at once: a step is short
        keys = fold(key.unsqueeze(-1), torch.arange(len(steps), device=some.device)).unbind(-1)
    # What lies where the last batch lay is in the cache; a hook, or autograd, might still have that one in its hands.
    for step, plain in enumerate(steps.batches(in_place=written is not None)):
        batch = plain._replace(key=keys[step])

        def loss(w: Params, batch: Batch = batch, buffers: Params = buffers) -> tuple[Tensor, Tree]:
            out = forward(w, buffers, batch)
            logits = out.logits if hooks.adjust_logits is None else hooks.adjust_logits(out.logits, w)
            value = cross_entropy(logits, batch.y, batch.mask)
            extra = None if hooks.penalty is None else hooks.penalty(w, out, batch)
            value = value if extra is None else value + extra
            return value, aux_of(value, out, last is not None)

        gradient, aux = grad(loss, params) if written is None else written(params, buffers, batch, gradient)
        losses.append(aux["loss"])
        grads = gradient
        if last is not None:
            mask = torch.ones_like(batch.y) if batch.mask is None else batch.mask
            share = last[step].unsqueeze(-1) * mask.to(some.dtype)  # [..., B]
            part = torch.einsum("...b,...bd->...d", share, aux["features"])
            features, seen = part if features is None else features + part, seen + share.sum(-1)
        if hooks.correct_gradient is not None:
            grads = hooks.correct_gradient(grads, params)
        if optimizer.rate is not None:
            # A scaled gradient times eta is the scaled update, and can be added at once.
            if hooks.correct_update is not None:
                grads = hooks.correct_update(grads, params)
            update, factor, next_state = grads, -optimizer.rate, state
        else:
            update, next_state = optimizer.step(grads, state, params)
            factor = 1.0
            if hooks.correct_update is not None:
                update = hooks.correct_update(update, params)
        # In place: a step's time is that of going through memory. The received model, and parameters that a client who
        # stands still keeps, are others' too.
        mine = step > 0 and batch.live is None
        stepped = _added(params, update, factor, params if mine else into if batch.live is None else None)
        if batch.live is None:
            params, state, buffers = stepped, next_state, aux["buffers"]
        else:
            live = batch.live
            params, state = select(live, stepped, params), select(live, next_state, state)
            buffers = select(live, aux["buffers"], buffers)
    mean = None if features is None else features / seen.clamp(min=1).unsqueeze(-1)
    count = zero + (len(steps) if steps.live is None else steps.live.sum(0))
    total = _step_losses(losses, steps, written is not None).sum(0) if losses else zero
    return Trace(start, params, buffers, count, total / count.clamp(min=1), state, mean)


def _step_losses(losses: list[Tensor], steps: Plan, by_sample: bool) -> Tensor:
    """The mean loss of each step, [S, ...], 0 where a client stands still."""
    if steps.sizes is not None:
        return torch.stack([loss.mean() for loss in losses])
    found = torch.stack(losses)
    if by_sample:  # means of all steps at once: one by one they take longer than what they are of
        return masked_mean(found, steps.mask, found.ndim - 1)
    return found if steps.live is None else torch.where(steps.live, found, 0)


def _added(params: Params, update: Params, factor: float, into: Params | None) -> Params:
    """params + factor update, put into `into` if there is such."""
    if into is None:
        return tree_map(lambda p, u: torch.add(p, u, alpha=factor), params, update)
    if into is params:  # vmap knows `add_`, but not `out`
        return tree_map(lambda p, u: p.add_(u, alpha=factor), params, update)
    return tree_map(lambda p, u, out: torch.add(p, u, alpha=factor, out=out), params, update, into)
