"""The client's side of an Ask, written for one client; the engines add the client axis."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plugins.core.algorithm import Algorithm
from plugins.core.component import Answer, Batch, Data, Plan, Stage, Trace, ValueAndGrad, View, Work
from plugins.core.noise import fold
from plugins.core.task import Output, Task, cross_entropy
from plugins.core.trees import Params, Tree, add, detach, leaves, select


def autograd(loss: Callable[[Params], tuple[Tensor, Tree]], params: Params) -> tuple[Params, Tree]:
    """(gradient, detached aux) by the autograd tape: the fast way for one client."""
    with torch.enable_grad():
        watched = {key: value.detach().requires_grad_() for key, value in params.items()}
        value, aux = loss(watched)
        grads = torch.autograd.grad(value, list(watched.values()))
    # A convolution's gradient can come in its input's layout; parameters stay as they are.
    return {key: grad.contiguous() for key, grad in zip(watched, grads, strict=True)}, detach(aux)


def functional(loss: Callable[[Params], tuple[Tensor, Tree]], params: Params) -> tuple[Params, Tree]:
    """(gradient, aux) by torch.func: the way that vmap can batch."""
    grads, aux = torch.func.grad(loss, has_aux=True)(params)
    return grads, aux


def local_steps(
    task: Task,
    params: Params,
    buffers: Params,
    data: Data,
    grad: ValueAndGrad,
    penalty: Callable[[Params, Output, Batch], Tensor | None] = lambda params, out, batch: None,
    adjust_logits: Callable[[Tensor, Params], Tensor] = lambda logits, params: logits,
    correct: Callable[[Params, Params, bool], Params] = lambda tree, params, update: tree,
    warm_start: Callable[[Tree], Tree] = lambda state: state,
) -> Trace:
    """Runs the steps of `data.steps` from `params` and returns their trace.

    `correct(tree, params, update)` sees the gradient (update False), then the optimiser's update (True).
    """
    start, state = params, warm_start(task.optimizer.init(params))
    some = next(leaves(params))
    count = total = torch.zeros((), dtype=some.dtype, device=some.device)
    last, seen, features = data.steps.last, count, torch.zeros_like(count)
    keys = fold(data.key, torch.arange(len(data.steps), device=some.device)).unbind()  # at once: a step is short
    for step, plain in enumerate(data.steps):
        batch = plain._replace(key=keys[step])

        def loss(w: Params, batch: Batch = batch, buffers: Params = buffers) -> tuple[Tensor, Tree]:
            out = task.forward(w, buffers, batch.x, train=True, mask=batch.mask, key=batch.key)
            value = cross_entropy(adjust_logits(out.logits, w), batch.y, batch.mask)
            extra = penalty(w, out, batch)
            value = value if extra is None else value + extra
            aux = {"loss": value, "buffers": out.buffers}
            return value, aux if last is None else aux | {"features": out.features}

        grads, aux = grad(loss, params)
        if last is not None:
            mask = torch.ones_like(batch.y) if batch.mask is None else batch.mask
            share = last[step] * mask.to(some.dtype)  # [B]
            features, seen = features + share @ aux["features"], seen + share.sum()
        update, next_state = task.optimizer.step(correct(grads, params, False), state, params)
        stepped = add(params, correct(update, params, True))
        if batch.live is None:
            params, state, buffers = stepped, next_state, aux["buffers"]
            count, total = count + 1, total + aux["loss"]
        else:
            live = batch.live
            params, state = select(live, stepped, params), select(live, next_state, state)
            buffers = select(live, aux["buffers"], buffers)
            count, total = count + live, total + torch.where(live, aux["loss"], torch.zeros_like(total))
    mean = None if last is None else features / seen.clamp(min=1)
    return Trace(start, params, buffers, count, total / count.clamp(min=1), state, mean)


def mean_features(task: Task, params: Params, buffers: Params, plan: Plan | None) -> Tensor:
    """The mean of the classifier's input over all samples of a plan, in eval mode, [d]."""
    assert plan is not None, "the component must name this pass in `passes`"

    def sums(batch: Batch) -> Tree:
        h = task.forward(params, buffers, batch.x, train=False).features
        return {"h": h.sum(0) if batch.mask is None else batch.mask.to(h.dtype) @ h}

    mean: Tensor = plan.mean(sums)["h"]
    return mean


def answer(
    algorithm: Algorithm,
    task: Task,
    job: str,
    params: Params,
    buffers: Params,
    shared: Tree,
    each: Tree,
    memory: Tree,
    data: Data,
    grad: ValueAndGrad,
    observing: bool = False,
) -> tuple[Answer, Trace | None]:
    """One client's answer to one Ask; uploads and memories are keyed by component. The trace is that of training.

    `params`, `buffers`: the model that came with the Ask, or the client's own result where the Ask sent none.
    `observing`: whether the answer has metrics.
    """
    views = {
        c.name: View(params, buffers, shared.get(c.name, {}), each.get(c.name, {}), memory[c.name], {})
        for c in algorithm.components
    }
    if job != "train":
        c = algorithm.owner(job)
        answered = c.answer(job, Work(task, params, buffers, views[c.name], data, grad, observing))
        own = {c.name: answered.upload}, memory | {c.name: answered.memory}, {c.name: answered.metrics}
        return Answer(answered.params, answered.buffers, *own), None

    for c in algorithm.components:
        prepared = c.prepare(task, views[c.name], data)
        views[c.name] = views[c.name]._replace(prepared=prepared)

    def penalty(w: Params, out: Output, batch: Batch) -> Tensor | None:
        terms = [c.penalty(task, w, out, batch, views[c.name]) for c in algorithm.components]
        present = [term for term in terms if term is not None]
        return torch.stack(present).sum() if present else None

    def adjust_logits(logits: Tensor, w: Params) -> Tensor:
        for c in algorithm.components:
            logits = c.adjust_logits(logits, task, w, views[c.name])
        return logits

    def correct(tree: Params, w: Params, update: bool) -> Params:
        for c in algorithm.components:
            if (c.stage is not Stage.DEBIAS) is update:
                tree = c.correct(tree, w, views[c.name])
        return tree

    def warm_start(state: Tree) -> Tree:
        for c in algorithm.components:
            state = c.warm_start(state, views[c.name])
        return state

    trace = local_steps(task, params, buffers, data, grad, penalty, adjust_logits, correct, warm_start)
    upload, kept, metrics = {}, {}, {}
    for c in algorithm.components:
        upload[c.name], kept[c.name] = c.report(task, trace, views[c.name], data)
        metrics[c.name] = c.observe(task, trace, views[c.name], data) if observing else {}
    return Answer(trace.end, trace.buffers, upload, kept, metrics), trace
