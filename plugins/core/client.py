"""The client's side of an Ask, written for one client; the engines add the client axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from plugins.core.algorithm import Algorithm
from plugins.core.component import Answer, Batch, Component, Data, Plan, Stage, Trace, ValueAndGrad, View, Work
from plugins.core.task import Output, Task
from plugins.core.training import Forward, Hooks, Written, autograd, aux_of, local_steps
from plugins.core.trees import Params, Tree


class Side(Protocol):
    """How what is written for one client is run: for one, or for many side by side, leaves [M, ...]."""

    def lift(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function of one client's trees as one of all clients' trees."""
        ...

    def every(self, tree: Tree) -> Tree:
        """What is the same for all, as each client's."""
        ...

    def forward(self, task: Task) -> Forward:
        """The forward pass in training."""
        ...

    def written(self, task: Task) -> Written | None:
        """Its gradient, where that is written out."""
        ...

    def data(self, own: Tree) -> Data:
        """In a lifted function: what the client reads."""
        ...


@dataclass(frozen=True)
class Alone:
    """One client."""

    given: Data

    def lift(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn

    def every(self, tree: Tree) -> Tree:
        return tree

    def forward(self, task: Task) -> Forward:
        return forward_of(task)

    def written(self, task: Task) -> Written | None:
        return written_of(task, 0)

    def data(self, own: Tree) -> Data:
        return self.given


def forward_of(task: Task) -> Forward:
    """One client's forward pass in training."""

    def forward(params: Params, buffers: Params, batch: Batch) -> Output:
        return task.forward(params, buffers, batch.x, train=True, mask=batch.mask, key=batch.key)

    return forward


def written_of(task: Task, axes: int) -> Written | None:
    """The gradient of the loss of one client, or of several side by side (`axes`), where it is written out."""
    if not task.written_out:
        return None

    def written(params: Params, buffers: Params, batch: Batch, room: Params) -> tuple[Params, Tree]:
        grads, losses, out = task.gradient(params, buffers, *batch[:3], batch.key, room, axes)
        return grads, aux_of(losses, out, True)

    return written


def mean_features(task: Task, params: Params, buffers: Params, plan: Plan | None) -> Tensor:
    """The mean of the classifier's input over all samples of a plan, in eval mode, [d]."""
    assert plan is not None, "the component must name this pass in `passes`"

    def sums(batch: Batch) -> Tree:
        h = task.forward(params, buffers, batch.x, train=False).features
        return {"h": h.sum(0) if batch.mask is None else batch.mask.to(h.dtype) @ h}

    mean: Tensor = plan.mean(sums)["h"]
    return mean


def train(
    algorithm: Algorithm,
    task: Task,
    params: Params,
    buffers: Params,
    shared: Tree,
    own: Tree,
    steps: Plan,
    side: Side,
    observing: bool = False,
    into: Params | None = None,
) -> tuple[Answer, Trace]:
    """Local training from the model that was received; uploads and memories are keyed by component.

    `own`: "key", and by component "each" and "memory", of the client or of all. `steps`: the batches of training.
    `observing`: whether the answer has metrics. `into`: where the trained parameters may be put.
    """
    components = algorithm.components

    def views(own: Tree) -> dict[str, View]:
        """What each component sees."""
        return {
            c.name: View(
                params, buffers, shared.get(c.name, {}), own["each"].get(c.name, {}), own["memory"][c.name],
                own.get("prepared", {}).get(c.name, {}),
            )
            for c in components
        }  # fmt: skip

    def first(own: Tree) -> Tree:
        """What is computed before the first step, and where the model, its buffers and the optimiser start."""
        seen = views(own)
        prepared = {c.name: c.prepare(task, seen[c.name], side.data(own)) for c in components}
        state, seen = task.optimizer.init(params), views(own | {"prepared": prepared})
        for c in components:
            state = c.warm_start(state, seen[c.name])
        return {"prepared": prepared, "params": params, "buffers": buffers, "state": state}

    def last(own: Tree, trace: Tree) -> Tree:
        """What is sent, kept and recorded."""
        found = Trace(start=params, **_with_none(trace, "features"))
        seen, data = views(own), side.data(own)
        sent = {c.name: c.report(task, found, seen[c.name], data) for c in components}
        metrics = {c.name: c.observe(task, found, seen[c.name], data) if observing else {} for c in components}
        upload, memory = ({name: pair[i] for name, pair in sent.items()} for i in (0, 1))
        return {"upload": upload, "memory": memory, "metrics": metrics}

    # Lifting takes its time even where there is nothing of one client to be lifted.
    began = side.lift(first)(own) if components else side.every(first(own))
    own = own | {"prepared": began["prepared"]}
    hooks = _hooks(algorithm, task, own, views, side)
    trace = local_steps(
        side.forward(task), task.optimizer, began["params"], began["buffers"], began["state"], steps, own["key"],
        autograd, hooks, side.written(task), into, task.network.draws or hooks.penalty is not None,
    )  # fmt: skip
    left = _fields(trace)
    del left["start"]  # the same for all
    ended = (side.lift(last) if components else last)(own, left)
    return Answer(trace.end, trace.buffers, **ended), trace


def _hooks(algorithm: Algorithm, task: Task, own: Tree, views: Callable[[Tree], dict[str, View]], side: Side) -> Hooks:
    """What the components add to local training, their hooks lifted; one that nobody overrides costs nothing."""
    own = {key: own[key] for key in ("each", "memory", "prepared")}

    def overriding(hook: str) -> list[Component]:
        return [c for c in algorithm.components if getattr(type(c), hook) is not getattr(Component, hook)]

    penalising, adjusting, correcting = (overriding(hook) for hook in ("penalty", "adjust_logits", "correct"))

    def penalty(own: Tree, w: Params, out: Output, batch: Tree) -> Tree:
        seen, of = views(own), Batch(**_with_none(batch, "mask", "live"))
        terms = [c.penalty(task, w, out, of, seen[c.name]) for c in penalising]
        present = [term for term in terms if term is not None]
        return {"sum": torch.stack(present).sum()} if present else {}

    def adjust_logits(own: Tree, logits: Tensor, w: Params) -> Tensor:
        seen = views(own)
        for c in adjusting:
            logits = c.adjust_logits(logits, task, w, seen[c.name])
        return logits

    def correct(of: list[Component], own: Tree, tree: Params, w: Params) -> Params:
        seen = views(own)
        for c in of:
            tree = c.correct(tree, w, seen[c.name])
        return tree

    def corrected(stages: Callable[[Stage], bool]) -> Callable[[Params, Params], Params] | None:
        of = [c for c in correcting if stages(c.stage)]
        if not of:
            return None

        def plain(own: Tree, tree: Params, w: Params) -> Params:
            return correct(of, own, tree, w)

        lifted = plain if all(c.broadcasts for c in of) else side.lift(plain)
        return lambda tree, w: lifted(own, tree, w)

    lifted_penalty, lifted_logits = side.lift(penalty), side.lift(adjust_logits)
    return Hooks(
        (lambda w, out, batch: lifted_penalty(own, w, out, _fields(batch)).get("sum")) if penalising else None,
        (lambda logits, w: lifted_logits(own, logits, w)) if adjusting else None,
        corrected(lambda stage: stage is Stage.DEBIAS),
        corrected(lambda stage: stage is not Stage.DEBIAS),
    )


def _fields(of: Batch | Trace) -> Tree:
    """What is there of a batch or a trace, as a tree."""
    return {key: leaf for key, leaf in of._asdict().items() if leaf is not None}


def _with_none(tree: Tree, *keys: str) -> Tree:
    """The tree with None where it lacks one of `keys`: the inverse of `_fields`."""
    return dict.fromkeys(keys) | tree


def further(
    algorithm: Algorithm,
    task: Task,
    job: str,
    params: Params,
    buffers: Params,
    shared: Tree,
    own: Tree,
    data: Data,
    grad: ValueAndGrad,
    observing: bool = False,
) -> Answer:
    """One client's answer to an Ask that a component made.

    `params`, `buffers`: the model that came with the Ask, or the client's own result where the Ask sent none. `own`: by
    component, "each" and "memory".
    """
    c, memory = algorithm.owner(job), own["memory"]
    view = View(params, buffers, shared.get(c.name, {}), own["each"].get(c.name, {}), memory[c.name], {})
    answered = c.answer(job, Work(task, params, buffers, view, data, grad, observing))
    sent = {c.name: answered.upload}, memory | {c.name: answered.memory}, {c.name: answered.metrics}
    return Answer(answered.params, answered.buffers, *sent)
