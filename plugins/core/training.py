"""Trains one client, and has the one loop behind that.

`train` is the plain form: one client, one step after the other. Engines bring their own loop for
the same local problem, and tests prove that it is equal. Refinements and learners on the server
call `descend`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedml_noniid.plugins.core.algorithm import Algorithm
from fedml_noniid.plugins.core.component import (
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
    overrides,
)
from fedml_noniid.plugins.core.contract import call
from fedml_noniid.plugins.core.data import Batch, Pass
from fedml_noniid.plugins.core.optimizers import Optimizer
from fedml_noniid.plugins.core.randomness import identity
from fedml_noniid.plugins.core.task import Output, Task
from fedml_noniid.plugins.core.trees import (
    Params,
    Tree,
    add,
    combined,
    leading,
    scale,
    select,
    tree_map,
)

Views = Mapping[Component, Client]  # the client as each component sees it
Objective = Callable[
    [Params, Params, Batch], tuple[Tensor, Output | None]
]  # (w, buffers, batch) -> loss, forward pass
Update = Callable[[Params, Tree, Params], tuple[Params, Tree]]  # as `Optimizer.step`
# (what a client's own model keeps, w, w's buffers, batch) -> the same after a step of its own
Beside = Callable[[Tree, Params, Params, Batch], Tree]
# (w, what computes the gradient at w) -> where the gradient is taken
Point = Callable[[Params, Callable[[], tuple[Params, Tree]]], Params]
NO_FEATURES = "trace.features is there for methods that declare Needs(last_epoch=True)"
NO_GRADIENT = "g is there for methods that declare Needs(gradient=True)"


class Descent(NamedTuple):
    """Where a descent stands; `Descent(params)` is where one begins."""

    params: Params
    buffers: Params = {}  # noqa: RUF012  # of a tuple, never changed
    state: Tree = {}  # noqa: RUF012  # the optimiser's; empty: as it begins
    steps: Tensor = torch.tensor(0)  # 0-d
    loss: Tensor = torch.tensor(0.0)  # 0-d, summed over the steps
    features: Tensor | None = None  # [d], mean over the last epoch
    own: Tree = {}  # noqa: RUF012, never changed in place. What its own model keeps: `own_start`


@dataclass(frozen=True)
class Step:
    """Applies the step equation: w <- w + rate factor optimiser(gradient + term(w))."""

    optimizer: Optimizer
    term: Callable[[Params], Params] | None = None
    factor: Params = field(default_factory=dict)  # of rows
    rate: Callable[[int], float | Tensor] | None = None  # of the step with this number; None: 1
    beside: Beside | None = None  # the step of the client's own model
    # (gradients of the samples [B, ...], batch) -> the gradient; None: of the mean loss
    gathered: Callable[[Params, Batch], Params] | None = None

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
    task: Task,
    loss: Objective,
    start: Descent,
    batches: Iterable[Batch],
    step: Step,
    key: Tensor | None = None,
    point: Point | None = None,
) -> Descent:
    """Takes a step down the gradient of the loss for each batch.

    `start`: parameters, buffers and state are read. `point`: None takes the gradient at w.
    """
    params, buffers, state, own = start.params, start.buffers, start.state, start.own
    state = state or step.optimizer.init(params)
    steps = total = next(iter(params.values())).new_zeros(())
    summed: Params = {}
    for s, batch in enumerate(batches):
        batch = batch if key is None else batch._replace(keys=key, step=s)

        def value(
            w: Params, batch: Batch = batch, buffers: Params = buffers
        ) -> tuple[Tensor, Tree]:
            found, out = loss(w, buffers, batch)
            return found, {"loss": found} | (
                {} if out is None else {"buffers": out.buffers, "h": out.features}
            )

        at = params if point is None else point(params, partial(task.grad, value, params))
        if step.gathered is None:
            grads, left = task.grad(value, at)
        else:
            grads, left = _of_samples(task, value, at, batch)
            grads = step.gathered(grads, batch)
        new = dict(zip(("w", "state"), step(grads, params, state, s), strict=True)) | {
            "buffers": left.get("buffers", buffers),
            "loss": total + left["loss"],
            "own": own if step.beside is None else step.beside(own, params, buffers, batch),
        }
        old = {"w": params, "state": state, "buffers": buffers, "loss": total, "own": own}
        if batch.personal is not None:
            moved = {"w": new["w"], "state": new["state"]}
            new |= alternated(task, batch.personal, params, moved, old)
        params, state, buffers, total, own = select(batch.live, new, old).values()
        steps = steps + (1 if batch.live is None else batch.live)
        if batch.last_epoch is not None:
            part = {"h": left["h"], "n": torch.ones_like(left["h"][:, 0])}
            summed = combined(torch.add, summed, scale(batch.last_epoch, tree_map(batch.sum, part)))
    mean = summed["h"] / summed["n"].clamp(min=1) if summed else None
    return Descent(params, buffers, state, steps, total, mean, own)


def _of_samples(
    task: Task, value: Callable[..., tuple[Tensor, Tree]], at: Params, batch: Batch
) -> tuple[Params, Tree]:
    """(the gradient of each sample by itself [B, ...], what else the pass leaves).

    The running statistics of a batch stay: a network with batch norms is refused.
    """
    found = []
    for i in range(len(batch.y)):
        part = {name: getattr(batch, name)[i : i + 1] for name in ("x", "y")}
        mask = None if batch.mask is None else batch.mask[i : i + 1]
        found.append(task.grad(partial(value, batch=batch._replace(**part, mask=mask)), at))
    grads = {name: torch.stack([one[name] for one, _ in found]) for name in at}
    left: Tree = {"loss": batch.mean(torch.stack([of["loss"] for _, of in found]))}
    if "h" in found[0][1]:
        left["h"] = torch.cat([of["h"] for _, of in found])
    return grads, left


def alternated(task: Task, personal: Tensor, params: Params, new: Tree, old: Tree) -> Tree:
    """The tree `new`, with the leaves as in `old` of the parameters that rest: the client's own
    part trains where `personal` says so, all others where it does not.

    `params`: all that train. What is of no parameter, such as Adam's count of steps, is new.
    """
    found: Tree = {}
    for name, leaf in new.items():
        if isinstance(leaf, dict):
            found[name] = alternated(task, personal, params, leaf, old[name])
        elif name in params:
            moves = personal if name in task.personal["params"] else ~personal
            found[name] = torch.where(leading(moves, leaf), leaf, old[name])
        else:
            found[name] = leaf
    return found


def scaled(update: Params, factor: Params) -> Params:
    """The update with its rows multiplied; parameters without a factor stay as they are."""
    return {
        name: leading(factor[name], leaf) * leaf if name in factor else leaf
        for name, leaf in update.items()
    }


def train(
    algorithm: Algorithm, client: Client, sent: Ask, memory: Tree, steps: Pass
) -> tuple[Trace, dict[str, Answer]]:
    """Local training from the received model: (trace, the answers by component), for one client."""
    task, views = client.task, component_views(algorithm, client, sent, memory)
    views = {c: replace(view, prepared=call(c, "prepare", view)) for c, view in views.items()}

    def loss(w: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Output]:
        out = task.train(w, buffers, batch)
        value = task.loss.mean(adjusted(algorithm, views, out.logits, w), batch.y, batch.mask)
        extra = penalty(views, w, out, batch)
        return value if extra is None else value + extra, out

    def beside(own: Tree, w: Params, buffers: Params, batch: Batch) -> Tree:
        def loss(v: Params) -> tuple[Tensor, Tree]:
            model = own_model(algorithm, views, v, w)
            out = task.train(model["params"], own.get(V_BUFFERS, buffers), batch)
            value = task.loss.mean(out.logits, batch.y, batch.mask)
            return value + model.get("penalty", 0), {"buffers": out.buffers}

        return own_step(task, own, loss, task.optimizer.step)

    own = own_start(algorithm, memory, task.optimizer)
    state, params = started(algorithm, views)
    start = Descent(client.params | params, client.buffers, state)._replace(own=own)
    step = Step(
        task.optimizer,
        lambda w: term(views, w),
        factor(views),
        beside=beside if own else None,
        gathered=gathering(algorithm, views),
    )
    found = descend(task, loss, start, steps, step, client.keys, point_of(algorithm, views))
    kept = own_memory(algorithm, memory, found.own)
    views = {c: replace(view, memory=kept.get(c.name, {})) for c, view in views.items()}
    return ended(algorithm, views, found, len(steps))


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
        found: Tree | None = call(c, "warm_start", view)
        starts[c] = (found or {}).get(START)
        state = {name: leaf for name, leaf in (found or {}).items() if name != START}
        states[c] = None if found is None or (starts[c] is not None and not state) else state
    state = algorithm.owned(Exclusive.OPTIMIZER_MEMORY, states) or {}
    return state, algorithm.owned(Exclusive.START, starts) or {}


def point_of(algorithm: Algorithm, views: Views) -> Point | None:
    """Where the components take the gradient; None: at w."""
    if not any(overrides(c, "gradient_point") for c in algorithm.components):
        return None

    def point(w: Params, gradient: Callable[[], tuple[Params, Tree]]) -> Params:
        g = gradient()[0] if algorithm.needs.gradient else {}
        return {**w, **shifted(algorithm, views, w, g)}

    return point


def shifted(algorithm: Algorithm, views: Views, w: Params, g: Params) -> Params:
    """The parameters at which the gradient is taken, without those that stay as they are in w."""
    bare = absent(NO_GRADIENT)
    found = {
        c: call(c, "gradient_point", w, g if c.needs.gradient else bare, view)
        for c, view in views.items()
    }
    return algorithm.owned(Exclusive.GRADIENT_POINT, found) or {}


def gathering(algorithm: Algorithm, views: Views) -> Callable[[Params, Batch], Params] | None:
    """What makes the gradient of a batch of those of its samples; None: that of the mean loss."""
    c = algorithm.per_sample
    if c is None:
        return None
    view = views[c]
    return lambda grads, batch: call(
        c, "sample_gradients", grads, batch._replace(scope=view.scope), view
    )


def left_as(algorithm: Algorithm, views: Views, delta: Params) -> Params:
    """The update as it leaves the client."""
    found = {c: call(c, "leaving", delta, view) for c, view in views.items()}
    changed = algorithm.owned(Exclusive.UPDATE, found)
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
    found = call(c, "own_model", v, w, views[c]) or OwnModel(w)
    return {name: part for name, part in found._asdict().items() if part is not None}


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
    found = [
        call(c, "penalty", w, out, batch._replace(scope=view.scope), view)
        for c, view in views.items()
    ]
    terms = [each for each in found if each is not None]
    return torch.stack(terms).sum() if terms else None


def term(views: Views, w: Params) -> Params:
    """The sum of what the components add to the gradient."""
    return combined(torch.add, *(call(c, "gradient_term", w, view) for c, view in views.items()))


def factor(views: Views) -> Params:
    """The product of the components' factors of the update."""
    return combined(torch.mul, *(call(c, "update_factor", view) for c, view in views.items()))


def ended(
    algorithm: Algorithm, views: Views, found: Descent, planned: int
) -> tuple[Trace, dict[str, Answer]]:
    """The trace of training, and the components' answers."""
    # Components that do not declare the need get `bare`, so none of them can read features.
    whole = Trace(
        found.params,
        found.buffers,
        found.steps,
        found.loss / found.steps.clamp(min=1),
        found.state,
        # None where no component declares the need: then none may read it.
        found.features,  # type: ignore[arg-type]
        planned,
    )
    bare = whole._replace(features=absent(NO_FEATURES))
    seen_by = ((c, whole if c.needs.last_epoch else bare, view) for c, view in views.items())
    return whole, {
        c.name: _completed(call(c, "report", trace, view), view) for c, trace, view in seen_by
    }


def answer(algorithm: Algorithm, client: Client, ask: Ask, memory: Tree) -> Answer:
    """One client's answer to an Ask that a component made; `client.params` is the model to use."""
    c = next(c for c in algorithm.components if c.name == ask.owner)
    view = _view(client, c, ask, memory, {})
    return _completed(call(c, "answer", view), view)


def _completed(found: Answer, view: Client) -> Answer:
    """The answer with the memory that it does not mention, and without metrics if they are not
    recorded."""
    return found._replace(
        memory=view.memory | found.memory, metrics=found.metrics if view.observing else {}
    )
