"""Defines local training: the loop of steps, and what components add to it.

Engines, refinements and learners on the server all run the loop `descend`. `engines.local` says
which gradient and which form of the step a client has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from fedml_noniid.core.algorithm import Algorithm
from fedml_noniid.core.component import (
    START,
    V_BUFFERS,
    Answer,
    Ask,
    Client,
    Component,
    Exclusive,
    OwnModel,
    Public,
    Trace,
    V,
    absent,
)
from fedml_noniid.core.contract import call
from fedml_noniid.core.data import Batch
from fedml_noniid.core.optimizers import Optimizer
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.randomness import identity
from fedml_noniid.core.task import Output, Task
from fedml_noniid.core.trees import Params, Tree, add, combined, leading, scale, select

Views = Mapping[Component, Client]  # the client as each component sees it
# (w, buffers, batch) -> loss, forward pass; without one, the buffers stay
Objective = Callable[[Params, Params, Batch], tuple[Tensor, Output | None]]
# (w, "buffers" and "own" of the last step, batch) -> the gradient; "loss", "buffers" and "own" of
# this step
Gradient = Callable[[Params, Tree, Batch], tuple[Params, Tree]]
Update = Callable[[Params, Tree, Params], tuple[Params, Tree]]  # as `Optimizer.step`
NO_GRADIENT = absent("g is there for methods that declare Needs(gradient=True)")


class _WithoutLoss(Trace):
    """What a component that does not need the loss sees of local training."""

    @property
    def loss(self) -> Tensor:
        raise RecipeError("trace.loss is there for methods that declare Needs(loss=True)")


class Descent(NamedTuple):
    """Where a descent stands; `Descent(params)` is where one begins."""

    params: Params
    buffers: Params = {}  # noqa: RUF012  # of a tuple, never changed
    state: Tree = {}  # noqa: RUF012  # the optimiser's; empty: as it begins
    steps: Tensor = torch.tensor(0)  # 0-d
    loss: Tensor = torch.tensor(0.0)  # 0-d, summed over the steps
    own: Tree = {}  # noqa: RUF012, never changed in place. What its own model keeps: `own_start`


@dataclass(frozen=True)
class Step:
    """Applies the step equation: w <- w + rate factor optimiser(gradient + term(w))."""

    optimizer: Optimizer
    term: Callable[[Params], Params] | None = None
    factor: Params = field(default_factory=dict)  # of rows
    rate: Callable[[int], float | Tensor] | None = None  # of the step with this number; None: 1

    def __call__(
        self, grads: Params, params: Params, state: Tree, s: int = 0, out: Params | None = None
    ) -> tuple[Params, Tree]:
        """(parameters, the optimiser's state) after step `s`.

        `out`: memory that a faster form may use.
        """
        update, state = self.optimizer.step(
            combined(torch.add, grads, self.term and self.term(params)), state, params
        )
        update = scaled(update, self.factor)
        return add(params, update if self.rate is None else scale(self.rate(s), update)), state


def descend(
    gradient: Gradient,
    start: Descent,
    batches: Iterable[Batch],
    step: Step,
    key: Tensor | None = None,
    out: Params | None = None,
    total: Callable[[list[Tensor]], Tensor] | None = None,
) -> Descent:
    """Takes a step down the gradient for each batch: the one loop of training.

    `key`: of the client, whose steps draw from it. `out`: memory that the new parameters may take.
    `total` makes the loss of those of the steps; None leaves that of `start`.
    """
    params, state = start.params, start.state or step.optimizer.init(start.params)
    carried: Tree = {"buffers": start.buffers, "own": start.own}
    count: int | Tensor = 0
    losses: list[Tensor] = []
    for s, batch in enumerate(batches):
        batch = batch._replace(keys=key, step=s)
        grads, left = gradient(params, carried, batch)
        # In place, because the passes over memory take most of a step's time. The received model
        # belongs to others too, and so do the parameters of a client that has no such step.
        into = None if batch.live is not None else params if s > 0 else out
        moved, after = step(grads, params, state, s, into)
        params, state = select(batch.live, moved, params), select(batch.live, after, state)
        carried = select(batch.live, {name: left[name] for name in carried}, carried)
        count = count + (1 if batch.live is None else batch.live)
        losses.append(left["loss"])
    loss = total(losses) if total is not None and losses else start.loss
    return Descent(params, steps=start.steps + count, state=state, loss=loss, **carried)


def gradient_of(task: Task, loss: Objective) -> Gradient:
    """The gradient of a loss."""

    def gradient(w: Params, carried: Tree, batch: Batch) -> tuple[Params, Tree]:
        def value(w: Params) -> tuple[Tensor, Tree]:
            mean, out = loss(w, carried["buffers"], batch)
            buffers = carried["buffers"] if out is None else out.buffers
            return mean, {"loss": mean, "buffers": buffers}

        grads, left = task.grad(value, w)
        return grads, {**carried, **left}

    return gradient


def scaled(update: Params, factor: Params) -> Params:
    """The update with its rows multiplied; parameters without a factor stay as they are."""
    return {
        name: leading(factor[name], leaf) * leaf if name in factor else leaf
        for name, leaf in update.items()
    }


def component_views(
    algorithm: Algorithm, client: Client, sent: Ask, memory: Tree, prepared: Tree | None = None
) -> Views:
    """The client as each component sees it: its own slices and key, and the data that it
    declares."""
    return {
        c: _view(client, c, sent, memory, (prepared or {}).get(c.name, {}))
        for c in algorithm.components
    }


def _view(client: Client, c: Component, sent: Ask, memory: Tree, prepared: Tree) -> Client:
    local_set, public = c.needs.local_set, c.needs.public is not Public.NOTHING
    return Client(
        client.task,
        client.params,
        client.buffers,
        client.round,
        client.local_set if local_set else Client.local_set,
        client.public if public else Client.public,
        sent.shared.get(c.name, {}),
        sent.each.get(c.name, {}),
        memory.get(c.name, {}),
        prepared,
        client.job,
        client.observing,
        client.keys,
        identity(c),
        client.noised,
    )


def started(algorithm: Algorithm, views: Views) -> tuple[Tree, Params]:
    """What local training starts from: the optimiser's state, and parameters; what is missing is as
    always."""
    states: dict[Component, Tree | None] = {}
    starts: dict[Component, Params | None] = {}
    for c, view in views.items():
        warm: Tree | None = call(c, "warm_start", view)
        starts[c] = (warm or {}).get(START)
        state = {name: leaf for name, leaf in (warm or {}).items() if name != START}
        states[c] = None if warm is None or (starts[c] is not None and not state) else state
    state = algorithm.owned(Exclusive.OPTIMIZER_MEMORY, states) or {}
    return state, algorithm.owned(Exclusive.START, starts) or {}


def shifted(algorithm: Algorithm, views: Views, w: Params, g: Params) -> Params:
    """The parameters at which the gradient is taken, without those that stay as they are in w."""
    points = {
        c: call(c, "gradient_point", w, g if c.needs.gradient else NO_GRADIENT, view)
        for c, view in views.items()
    }
    return algorithm.owned(Exclusive.GRADIENT_POINT, points) or {}


def left_as(algorithm: Algorithm, views: Views, delta: Params) -> Params:
    """The update as it leaves the client."""
    leaving = {c: call(c, "leaving", delta, view) for c, view in views.items()}
    changed = algorithm.owned(Exclusive.UPDATE, leaving)
    return delta if changed is None else changed


def own_start(algorithm: Algorithm, memory: Tree, optimizer: Optimizer) -> Tree:
    """What trains for a client's own model: its parameters, buffers if it has some, and the
    optimiser's state. Empty if nothing trains."""
    c = algorithm.own_model
    mine: Tree = {} if c is None else memory[c.name]
    if V not in mine:
        return {}
    own = {name: mine[name] for name in (V, V_BUFFERS) if name in mine}
    return {**own, "state": optimizer.init(own[V])}


def own_model(algorithm: Algorithm, views: Views, v: Params, w: Params) -> Tree:
    """A client's own model: "params", and "penalty" if it has one. It is w if the component makes
    none."""
    c = algorithm.own_model
    assert c is not None, "asked only where there is one"
    own = call(c, "own_model", v, w, views[c]) or OwnModel(w)
    return {name: part for name, part in own._asdict().items() if part is not None}


def own_step(
    task: Task, own: Tree, loss: Callable[[Params], tuple[Tensor, Tree]], update: Update
) -> Tree:
    """What a client's own model keeps after a step. `loss`: of v; `update`: the optimiser's."""
    grads, left = task.grad(loss, own[V])
    moved, state = update(grads, own["state"], own[V])
    new = {V: add(own[V], moved), V_BUFFERS: left["buffers"], "state": state}
    return {name: new[name] for name in own}


def own_memory(algorithm: Algorithm, memory: Tree, own: Tree) -> Tree:
    """The client's memory with what its own model keeps after training."""
    c = algorithm.own_model
    kept = {name: tree for name, tree in own.items() if name != "state"}
    return memory if c is None else memory | {c.name: memory[c.name] | kept}


def adjusted(algorithm: Algorithm, views: Views, logits: Tensor, w: Params) -> Tensor:
    """The logits as the loss sees them."""
    changed = algorithm.owned(
        Exclusive.LOGITS, {c: call(c, "logits", logits, w, view) for c, view in views.items()}
    )
    return logits if changed is None else changed


def penalty(views: Views, w: Params, out: Output, batch: Batch) -> Tensor | None:
    """The sum of the components' terms of the loss."""
    penalties = [
        call(c, "penalty", w, out, batch._replace(scope=view.scope), view)
        for c, view in views.items()
    ]
    terms = [each for each in penalties if each is not None]
    return torch.stack(terms).sum() if terms else None


def term(views: Views, w: Params) -> Params:
    """The sum of what the components add to the gradient."""
    return combined(torch.add, *(call(c, "gradient_term", w, view) for c, view in views.items()))


def factor(views: Views) -> Params:
    """The product of the components' factors of the update."""
    return combined(torch.mul, *(call(c, "update_factor", view) for c, view in views.items()))


def ended(
    algorithm: Algorithm, views: Views, descent: Descent, planned: int
) -> tuple[Trace, dict[str, Answer]]:
    """The trace of training, and the components' answers."""
    trace = Trace(
        descent.params,
        descent.buffers,
        descent.steps,
        descent.loss / descent.steps.clamp(min=1),
        descent.state,
        planned,
    )
    return trace, {
        c.name: _completed(
            call(c, "report", trace if c.needs.loss else _WithoutLoss(*trace), view), view
        )
        for c, view in views.items()
    }


def answer(algorithm: Algorithm, client: Client, ask: Ask, memory: Tree) -> Answer:
    """One client's answer to an Ask that a component made; `client.params` is the model to use."""
    c = next(c for c in algorithm.components if c.name == ask.owner)
    view = _view(client, c, ask, memory, {})
    return _completed(call(c, "answer", view), view)


def _completed(answer_: Answer, view: Client) -> Answer:
    """The answer with the memory that it does not mention, and without metrics if they are not
    recorded."""
    return answer_._replace(
        memory=view.memory | answer_.memory, metrics=answer_.metrics if view.observing else {}
    )
