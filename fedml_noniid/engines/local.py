"""Trains as the engines do: the core's local problem, for one client or several side by side.

Trees of several clients have an axis [M] in front of every leaf. No function here reads that axis:
the engine's `ClientAxis` lifts functions of one client to several. docs/performance.md says how
much each shortcut saves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fedml_noniid.core.algorithm import Algorithm
from fedml_noniid.core.component import V_BUFFERS, Ask, Client, overrides
from fedml_noniid.core.contract import call
from fedml_noniid.core.data import Batch, Pass, masked_mean
from fedml_noniid.core.optimizers import SGD, Optimizer
from fedml_noniid.core.task import Output, Task, functional
from fedml_noniid.core.training import (
    Descent,
    Gradient,
    Step,
    Update,
    Views,
    adjusted,
    component_views,
    descend,
    ended,
    factor,
    own_memory,
    own_model,
    own_start,
    own_step,
    penalty,
    scaled,
    shifted,
    started,
    term,
)
from fedml_noniid.core.trees import Params, Tree, combined, leading, tree_map
from fedml_noniid.engines.clients import marked
from fedml_noniid.engines.device import tf32
from fedml_noniid.engines.personal import PERSONAL, Alternating, joined, over, parted, personalized
from fedml_noniid.models.model import Model

# (buffers, batch, what it draws, parameters) -> the gradient of the mean loss, in the
# memory of the last gradient, and the second result of `autograd`. Its loss is that of each sample,
# [..., B].
Written = Callable[[Params, Batch, Params, Params], tuple[Params, Tree]]


@dataclass(frozen=True)
class ClientAxis:
    """Runs functions of one client for one client, or for `count` side by side, leaves [M, ...]."""

    client: Callable[[Tree], Client]  # the client of its trees, as the core scopes it
    memory: Params  # of gradients, which those of the next clients take again
    count: int | None = None  # M; None: one client, without an axis

    @property
    def single(self) -> bool:
        """Whether there is one client only; then `lift` changes nothing."""
        return self.count is None

    def lift(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function of one client's trees as one of all clients' trees."""
        return fn if self.single else torch.func.vmap(fn)

    def every(self, tree: Tree) -> Tree:
        """A tree that all clients share, as the tree of each client."""
        if self.count is None:
            return tree
        return tree_map(lambda leaf: leaf.expand(self.count, *leaf.shape), tree)

    def forward(
        self, task: Task, params: Params, buffers: Params, batch: Batch, drawn: Params
    ) -> Output:
        """The forward pass in training; `drawn`: what the network draws in this step."""
        model = cast("Model", task.network)
        if self.single or model.dense:
            whole, axes = task.whole(params), 0 if self.single else 1
            return model(whole, buffers, batch.x, True, batch.mask, None, drawn, axes=axes)

        def forward(params: Params, buffers: Params, batch: Tree, drawn: Params) -> Output:
            x, mask = batch["x"], batch.get("mask")
            return model(task.whole(params), buffers, x, True, mask, None, drawn)

        out: Output = torch.func.vmap(forward)(params, buffers, _fields(batch), drawn)
        return out

    def written(self, task: Task) -> Written | None:
        """The gradient of the loss, if it is written out."""
        model = cast("Model", task.network)
        written_out = model.written_out and task.loss.written
        if task.fixed or not written_out or not (self.single or model.dense):
            return None
        axes = 0 if self.single else 1

        def written(
            buffers: Params, batch: Batch, drawn: Params, params: Params
        ) -> tuple[Params, Tree]:
            x, y, mask, *_ = batch
            slope = partial(task.loss.gradient, y=y, mask=mask)
            grads, losses, statistics = model.gradient(
                params, buffers, x, slope, mask, drawn, self.memory, axes
            )
            return grads, {"loss": losses, "buffers": statistics.buffers}

        return written


class StepInputs(NamedTuple):
    """Holds what the steps of local training read, and where their result goes."""

    steps: Pass
    drawn: Iterator[Params]  # what the network draws, step by step
    out: Params | None  # memory that the trained parameters may take


class Hooks(NamedTuple):
    """Holds what components add to a step; None where no component does."""

    penalty: Callable[[Params, Output, Batch], Tensor | None] | None = None
    logits: Callable[[Tensor, Params], Tensor] | None = None
    term: Callable[[Params], Params] | None = None
    # (w, what computes the gradient at w) -> the parameters at which it is taken, if not at w
    point: Callable[[Params, Callable[[], Params]], Params] | None = None
    # (v, w) -> "params" and "penalty" of the client's own model
    own_model: Callable[[Params, Params], Tree] | None = None
    # (batch, buffers, w) -> the gradient of those of the samples, and what else their passes leave
    gathered: Callable[[Batch, Params, Params], tuple[Params, Tree]] | None = None


def train(
    algorithm: Algorithm,
    task: Task,
    axis: ClientAxis,
    sent: Ask,
    clients: Tree,
    inputs: StepInputs,
) -> tuple[Descent, Tree]:
    """Local training from the received model: where it ended, and the answers' fields by component.

    `clients`: "key", "each" and "memory" of the client, or of all, and the received "model" if it
    is not that of `sent`.
    """

    def views(trees: Tree) -> Views:
        each, memory = trees["each"], trees["memory"]
        client = personalized(axis.client(trees), memory)
        mine = sent._replace(each=each)
        return component_views(algorithm, client, mine, memory, trees.get("prepared"))

    def first(trees: Tree) -> Tree:
        """What is computed before the first step, and where the model, its buffers and the
        optimiser start."""
        prepared = {c.name: call(c, "prepare", view) for c, view in views(trees).items()}
        seen = views(trees | {"prepared": prepared})
        model = trees.get("model", {"params": sent.params, "buffers": sent.buffers})
        params, buffers = joined(model["params"], model["buffers"], trees["memory"])
        given_state, given_params = started(algorithm, seen)
        params = params | given_params
        start = {"params": params, "buffers": buffers, "prepared": prepared}
        state = over(task.optimizer.init(params), given_state)
        own = own_start(algorithm, trees["memory"], task.optimizer)
        return start | {"factor": factor(seen), "state": state, "own": own}

    # Lifting takes time even where there is nothing to lift.
    components = algorithm.components
    began = axis.lift(first)(clients) if components else axis.every(first(clients))
    clients = clients | {"prepared": began["prepared"]}
    hooks, personal = _hooks(algorithm, clients, views, axis), PERSONAL in clients["memory"]
    if algorithm.per_sample is not None:
        hooks = hooks._replace(gathered=_gathered(algorithm, task, clients, views, axis))
    if personal:
        hooks = _sharing(hooks, sent.params)
        fresh = {name: torch.empty_like(leaf) for name, leaf in began["params"].items()}
        inputs = inputs._replace(out=fresh | inputs.out if inputs.out else None)

    walk = LocalSteps(axis, task, clients["key"], hooks)
    with tf32(cast("Model", task.network).precision == "tf32"):
        trained = walk(began, inputs)

    def last(trees: Tree, left: Tree) -> Tree:
        """What is sent, remembered and recorded."""
        _, answers = ended(algorithm, views(trees), Descent(**left), len(inputs.steps))
        return {
            field: {name: getattr(answer, field) for name, answer in answers.items()}
            for field in ("upload", "memory", "metrics")
        }

    if personal:
        memory, shared = parted(clients["memory"], trained.params, trained.buffers, trained.state)
        trained = trained._replace(params=shared[0], buffers=shared[1], state=shared[2])
        clients = clients | {"memory": memory}
    clients = clients | {"memory": own_memory(algorithm, clients["memory"], trained.own)}
    left = {key: leaf for key, leaf in trained._asdict().items() if leaf is not None}
    answers = (axis.lift(last) if components else last)(clients, left)
    if personal:
        answers["memory"][PERSONAL] = clients["memory"][PERSONAL]
    if components:
        trained = trained._replace(loss=axis.lift(marked)(trained.loss, answers["memory"]))
    return trained, answers


def _sharing(hooks: Hooks, params: Params) -> Hooks:
    """The hooks, of which each sees the parameters that are in `params`."""

    def shared(hook: Callable[..., Any] | None, position: int) -> Callable[..., Any] | None:
        if hook is None:
            return None
        return lambda *args: hook(
            *args[:position], {name: args[position][name] for name in params}, *args[position + 1 :]
        )

    return Hooks(
        shared(hooks.penalty, 0),
        shared(hooks.logits, 1),
        shared(hooks.term, 0),
        shared(hooks.point, 0),
        None,  # refused beside personal parts
        hooks.gathered,  # a sample's gradient is that of all that trains
    )


def _gathered(
    algorithm: Algorithm,
    task: Task,
    clients: Tree,
    views: Callable[[Tree], Views],
    axis: ClientAxis,
) -> Callable[[Batch, Params, Params], tuple[Params, Tree]]:
    """The gradient that a component makes of those of the samples: each is a batch of one."""
    c = algorithm.per_sample
    assert c is not None, "asked only where there is one"
    alone = replace(axis, count=None)
    vmappable = replace(task, network=replace(cast("Any", task.network), plain=False))

    def of_client(
        step: int, client: Tree, batch: Tree, buffers: Params, w: Params
    ) -> tuple[Params, Tree]:
        view = views(client)[c]
        steps = LocalSteps(alone, vmappable, client["key"], _hooks(algorithm, client, views, alone))

        def sample(parts: Tree) -> tuple[Params, Tree]:
            part = Batch(
                **tree_map(lambda leaf: leaf.unsqueeze(0), parts), keys=steps.key, step=step
            )
            return functional(partial(steps._loss, part, buffers, {}), w)

        whole = Batch(**batch, step=step)
        parts = {name: leaf for name, leaf in batch.items() if name in ("x", "y", "mask")}
        grads, left = torch.func.vmap(sample)(parts)
        scoped = whole._replace(scope=view.scope)
        return call(c, "sample_gradients", grads, scoped, view), {
            "loss": whole.mean(left["loss"]),
            "buffers": buffers,
        }

    def gathered(batch: Batch, buffers: Params, w: Params) -> tuple[Params, Tree]:
        lifted = axis.lift(partial(of_client, batch.step))
        gradient: tuple[Params, Tree] = lifted(clients, _fields(batch), buffers, w)
        return gradient

    return gathered


def _hooks(
    algorithm: Algorithm, clients: Tree, views: Callable[[Tree], Views], axis: ClientAxis
) -> Hooks:
    """The components' hooks of a step.

    `gradient_term` is elementwise, so it takes all clients' trees as they are.
    """

    if not algorithm.components:
        return Hooks()

    def some(hook: str) -> bool:
        return any(overrides(c, hook) for c in algorithm.components)

    at_once = views(clients) if axis.single or some("gradient_term") else {}

    def lifted(hook: Callable[..., Any]) -> Callable[..., Any]:
        """A function of a client's views, as one of what follows them, of all clients."""

        def of_client(trees: Tree, *args: Any) -> Any:
            return hook(at_once if axis.single else views(trees), *args)

        return partial(axis.lift(of_client), clients)

    def penalised(w: Params, out: Output, batch: Batch) -> Tensor | None:
        def penalties(seen: Views, w: Params, out: Output, fields: Tree) -> Tree:
            terms = penalty(seen, w, out, Batch(**fields, step=batch.step))
            return {} if terms is None else {"sum": terms}

        terms: Tree = lifted(penalties)(w, out, _fields(batch))
        return terms.get("sum")

    def point(w: Params, gradient: Callable[[], Params]) -> Params:
        g = gradient() if algorithm.needs.gradient else {}
        points: Params = lifted_points(w, {name: g[name] for name in w if name in g})
        return points

    lifted_points = lifted(partial(shifted, algorithm))
    return Hooks(
        penalised if some("penalty") else None,
        lifted(partial(adjusted, algorithm)) if some("logits") else None,
        partial(term, at_once) if some("gradient_term") else None,
        point if some("gradient_point") else None,
        lifted(partial(own_model, algorithm)) if some("own_model") else None,
    )


def _fields(batch: Batch) -> Tree:
    """The tensors of a batch, as a tree."""
    return {key: leaf for key, leaf in batch._asdict().items() if isinstance(leaf, Tensor)}


@dataclass(frozen=True)
class LocalSteps:
    """Takes the steps of local training."""

    axis: ClientAxis
    task: Task
    key: Tensor  # of the client, or of each [M]
    hooks: Hooks

    def __call__(self, began: Tree, inputs: StepInputs) -> Descent:
        """As `core.training.descend` for the batches of `inputs`.

        `began`: "params", "buffers", the optimiser's "state" and the update's "factor" before the
        first step.
        """
        # The written-out gradient is that of the loss without hooks.
        hooks = self.hooks
        bare = hooks.penalty is None and hooks.logits is None and hooks.gathered is None
        written = self.axis.written(self.task) if bare else None
        plain = plain_rate(self.task.optimizer) is not None
        if written is None or not plain or hooks.point is not None or began["own"]:
            return self._descended(began, inputs, written)
        # No gradient is ever taken of these steps. In this mode torch keeps no record for one:
        # calls get shorter.
        with torch.inference_mode():
            end = self._descended(began, inputs, written)
        # What is made in this mode can't be used where a gradient is taken; a copy can.
        left = {field: tree for field, tree in end._asdict().items() if tree is not None}
        return end._replace(
            **tree_map(lambda leaf: leaf.clone() if leaf.is_inference() else leaf, left)
        )

    def _descended(self, began: Tree, inputs: StepInputs, written: Written | None) -> Descent:
        """As a call. `written`: the gradient, if it is written out."""
        steps, drawn, out = inputs
        some = next(iter(began["params"].values()))
        zero = torch.zeros(self.key.shape, dtype=some.dtype, device=some.device)
        start = Descent(
            **{name: began[name] for name in ("params", "buffers", "state", "own")},
            steps=zero,
            loss=zero,
        )
        step = step_form(self, began["factor"], owned=written is not None)
        if steps.personal is not None:
            step = Alternating(step.optimizer, step=step, task=self.task, flags=steps.personal)
        gradient = self._gradient(drawn, written)
        total = partial(_total, steps, written is not None)
        return descend(gradient, start, steps, step, self.key, out, total)

    def _gradient(self, drawn: Iterator[Params], written: Written | None) -> Gradient:
        """What takes the gradient of a step, and trains the client's own model beside it."""

        def taken(batch: Batch, buffers: Params, draws: Params, w: Params) -> tuple[Params, Tree]:
            if self.hooks.gathered is not None:
                return self.hooks.gathered(batch, buffers, w)
            if written is not None:
                return written(buffers, batch, draws, w)
            return self.task.grad(partial(self._loss, batch, buffers, draws), w)

        def gradient(w: Params, carried: Tree, batch: Batch) -> tuple[Params, Tree]:
            own, buffers, draws = carried["own"], carried["buffers"], next(drawn)
            if own:  # before w's step, which may be in place
                own = self._beside(own, w, buffers, batch, draws)
            at_w = partial(taken, batch, buffers, draws)
            grads, left = at_w(self._point(w, at_w))
            return grads, {**left, "own": own}

        return gradient

    def _beside(self, own: Tree, w: Params, buffers: Params, batch: Batch, drawn: Params) -> Tree:
        """A step of the client's own model: its pass draws what w's draws."""
        made = self.hooks.own_model
        assert made is not None, "something trains for it"

        def loss(v: Params) -> tuple[Tensor, Tree]:
            model = made(v, w)
            own_buffers = own.get(V_BUFFERS, buffers)
            out = self.axis.forward(self.task, model["params"], own_buffers, batch, drawn)
            value = self.task.loss.mean(out.logits, batch.y, batch.mask)
            return value + model.get("penalty", 0), {"buffers": out.buffers}

        return own_step(self.task, own, loss, update_form(self))

    def _point(self, w: Params, gradient: Callable[[Params], tuple[Params, Tree]]) -> Params:
        """Where the gradient of a step is taken."""
        if self.hooks.point is None:
            return w
        # A copy: the memory of the gradient at w is that of the gradient at the point.
        return {**w, **self.hooks.point(w, lambda: tree_map(torch.clone, gradient(w)[0]))}

    def _loss(self, batch: Batch, buffers: Params, drawn: Params, w: Params) -> tuple[Tensor, Tree]:
        """The loss of a step, and what else its pass leaves."""
        output = self.axis.forward(self.task, w, buffers, batch, drawn)
        logits = output.logits if self.hooks.logits is None else self.hooks.logits(output.logits, w)
        value = self.task.loss.mean(logits, batch.y, batch.mask)
        extra = None if self.hooks.penalty is None else self.hooks.penalty(w, output, batch)
        value = value if extra is None else value + extra
        return value, {"loss": value, "buffers": output.buffers}


@dataclass(frozen=True)
class InMemory(Step):
    """Takes the core's step in fewer passes over memory: plain SGD adds the gradient in one, and
    results take old memory.

    torch rounds w - eta g of one pass once, and that of two passes twice.
    """

    # the gradient's memory is the step's; autograd may give one tensor for two leaves
    owned: bool = False
    fused: float | None = None  # eta of plain SGD
    update: Callable[..., tuple[Params, Tree]] = SGD.step  # the optimiser's, of all clients

    def __call__(
        self, grads: Params, params: Params, state: Tree, s: int = 0, out: Params | None = None
    ) -> tuple[Params, Tree]:
        """`out`: memory that the new parameters take; it may be that of `params`."""
        grads = grads if self.term is None else _plus(grads, self.term(params), self.owned)
        if self.fused is not None:  # the scaled gradient times -eta is the scaled update
            return _added(params, _scaled(grads, self.factor, self.owned), -self.fused, out), state
        update, state = self.update(grads, state, params)
        return _added(params, _scaled(update, self.factor, in_place=True), 1.0, out), state


def step_form(walk: LocalSteps, factor: Params, owned: bool) -> Step:
    """The form of the step equation that local training runs. `owned`: as in `InMemory`."""
    optimizer = walk.task.optimizer
    return InMemory(
        optimizer,
        walk.hooks.term,
        factor,
        owned=owned,
        fused=plain_rate(optimizer),
        update=update_form(walk),
    )


def update_form(walk: LocalSteps) -> Update:
    """The optimiser's step of all clients: a norm is that of one client."""
    optimizer = walk.task.optimizer
    return walk.axis.lift(optimizer.step) if optimizer.clip else optimizer.step


def plain_rate(optimizer: Optimizer) -> float | None:
    """eta of plain SGD, whose update is -eta times the gradient and can be added in one pass; None
    for others."""
    plain = isinstance(optimizer, SGD) and not (
        optimizer.momentum or optimizer.weight_decay or optimizer.clip
    )
    return optimizer.lr if plain else None


def _plus(grads: Params, added: Params, in_place: bool) -> Params:
    """The gradient with a term; leaves without one stay as they are."""
    if not in_place:
        return combined(torch.add, grads, added)
    for name, leaf in added.items():
        grads[name].add_(leaf)
    return grads


def _scaled(update: Params, factor: Params, in_place: bool) -> Params:
    """The update with its rows multiplied; leaves without factors stay as they are."""
    if not (factor and in_place):
        return scaled(update, factor) if factor else update
    for name, rows in factor.items():
        update[name].mul_(leading(rows, update[name]))
    return update


def _total(steps: Pass, by_sample: bool, losses: list[Tensor]) -> Tensor:
    """The sum of the steps' mean losses, without those of steps that a client does not have."""
    if steps.sizes is not None:
        return torch.stack([loss.mean() for loss in losses]).sum(0)
    stacked = torch.stack(losses)  # [S, ...]
    # Means of all steps at once: step by step, they take longer than the losses themselves.
    if by_sample:
        return masked_mean(stacked, steps.mask, stacked.ndim - 1).sum(0)
    return (stacked if steps.live is None else torch.where(steps.live, stacked, 0)).sum(0)


def _added(params: Params, update: Params, amount: float, out: Params | None) -> Params:
    """params + amount update, put into `out` if it is given."""
    if out is None:
        return tree_map(lambda p, u: torch.add(p, u, alpha=amount), params, update)
    if out is params:
        torch._foreach_add_(list(params.values()), [update[name] for name in params], alpha=amount)
        return params
    return tree_map(lambda p, u, into: torch.add(p, u, alpha=amount, out=into), params, update, out)
