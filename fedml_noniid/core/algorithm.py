"""Composes a set of components into an algorithm, whose round is a generator of Asks.

FedAvg is the empty set.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedml_noniid.core.component import (
    BODY,
    HEAD,
    MODEL_OF,
    MODELS,
    NORMS,
    OWNS,
    Ask,
    Change,
    Component,
    Exchanges,
    Exclusive,
    Mechanism,
    Needs,
    Public,
    Replies,
    Reply,
    Server,
    Setting,
    absent,
    overrides,
)
from fedml_noniid.core.contract import (
    call,
    check_kind,
    check_models,
    checked,
    described,
    failure,
    is_foreign,
    is_sound,
    watched,
    watching,
)
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.packing import Packing
from fedml_noniid.core.randomness import identity
from fedml_noniid.core.sums import weighted_mean
from fedml_noniid.core.task import Task
from fedml_noniid.core.trees import Params, Tree, add, hidden, leaves

T = TypeVar("T")
TRAIN = "train"  # the job of local training, which no component may ask for


class State(NamedTuple):
    """Holds the server between rounds."""

    params: Params  # the model that is sent
    buffers: Params
    slices: Tree  # by component


class RoundResult(NamedTuple):
    """The result of a round."""

    state: State
    evaluated: Params | None  # None: the model that is sent
    metrics: Tree  # by component
    trained: Params  # w_k - w_t of local training, [M, ...]
    weights: Tensor  # q_k of the clients in the average, [M] float64


NO_REPLIES = "the clients' answers are hidden by noise in their sum; server.update has it"
# What acts on the server's one model.
OF_SERVER = {Exclusive.AVERAGE, Exclusive.SERVER_LEARNING, Exclusive.SERVER_STEP}
# Parts that a client may keep, in words.
KEPT = {NORMS: "batch norms", HEAD: "classifier", BODY: "layers before the classifier"}


@dataclass(frozen=True)
class Algorithm:
    """Describes a recipe; every runtime runs it.

    The order of `components` affects rounding only; `compose` fixes it.
    """

    components: tuple[Component, ...] = ()
    setting: Setting = field(default=Setting(1, 1))

    @staticmethod
    def compose(components: Iterable[Component], setting: Setting) -> Algorithm:
        """Composes.

        RecipeError names two components that own the same thing, that thing, and why both can't own
        it.
        """
        watched.clear()
        ordered = tuple(sorted(components, key=identity))
        for c in ordered:
            _check(c, setting)
        for a, b in combinations(sorted(ordered, key=lambda c: c.name), 2):
            clash = sorted(claim.value for claim in a.exclusive & b.exclusive)
            owned = "; ".join(f"both own the {what}, and {reason}" for what, reason in clash)
            unsound = _unsound(a, b) or _unsound(b, a) or _exposed(a, b) or _exposed(b, a)
            if why := unsound or owned:
                raise RecipeError(
                    f"{a.name!r} and {b.name!r} can't be combined: {why}; drop one of them"
                )
        return Algorithm(ordered, setting)

    @property
    def name(self) -> str:
        """The recipe's canonical name."""
        return "+".join(sorted(c.name for c in self.components)) or "fedavg"

    @property
    def needs(self) -> Needs:
        """What the components need together."""
        parts = [Needs(), *(c.needs for c in self.components)]
        most = {f.name: max(getattr(needs, f.name) for needs in parts) for f in fields(Needs)}
        return Needs(**most | {"personal": frozenset().union(*(part.personal for part in parts))})

    @property
    def uniform(self) -> bool:
        """Whether all clients weigh the same before `weigh`, and not by their samples."""
        return any(c.weights == "uniform" for c in self.components)

    @property
    def own_model(self) -> Component | None:
        """The component that gives each client a model of its own, if one does."""
        return next((c for c in self.components if overrides(c, "own_model")), None)

    @property
    def received(self) -> Component | None:
        """The component that sends clients models of its own in place of w_t, if one does."""
        return next((c for c in self.components if Exclusive.RECEIVED in c.exclusive), None)

    @property
    def chooser(self) -> Component | None:
        """The component that chooses the clients of each round, if one does."""
        return next((c for c in self.components if overrides(c, "choose")), None)

    @property
    def own_models(self) -> bool:
        """Whether a component gives each client a model of its own, beside personal parts."""
        return self._tests_received or self.own_model is not None

    @property
    def _tests_received(self) -> bool:
        """Whether clients are tested with the models that they receive in place of w_t."""
        return self.received is not None and Exclusive.OWN_MODEL in self.received.exclusive

    @property
    def per_sample(self) -> Component | None:
        """The component that takes the gradient of each sample, if one does."""
        mine = (c for c in self.components if overrides(c, "sample_gradients"))
        return next((c for c in mine if Exclusive.SAMPLE_GRADIENTS in c.exclusive), None)

    def packing(self, job: str) -> Packing | None:
        """How updates travel in the answers to a job; None: as they are."""
        packed = (c.packing for c in self.components if c.packing is not None and job == TRAIN)
        return next(packed, None)

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """The privacy noise of the components."""
        return tuple(mechanism for c in self.components if (mechanism := c.mechanism) is not None)

    @property
    def leak(self) -> str:
        """How the recipe uses the test set, in words; "" if it does not."""
        return "; ".join(
            f"{c.name} trains on the test set"
            for c in self.components
            if c.needs.public is Public.TEST_SET
        )

    @property
    def exchanges(self) -> Exchanges:
        """Asks before the first round, in every round, and after the last."""
        parts = [c.exchanges(self.setting) for c in self.components]
        return Exchanges(
            sum(p.begin for p in parts),
            1 + sum(p.round for p in parts),
            sum(p.finish for p in parts),
        )

    def owned(self, claim: Exclusive, results: dict[Component, T | None]) -> T | None:
        """The result of the one component that has one.

        RecipeError if that component does not own it.
        """
        for c, result in results.items():
            if result is not None:
                _check_owner(c, claim)
        return next((result for result in results.values() if result is not None), None)

    def prepared(self, task: Task) -> Task:
        """The task with the optimiser that a component brings."""
        brought = {c: call(c, "optimizer", task.optimizer) for c in self.components}
        optimizer = self.owned(Exclusive.OPTIMIZER, brought)
        return replace(task, optimizer=optimizer or task.optimizer)

    def init(self, at: Server) -> State:
        """The server before the first exchange."""
        slices = {c.name: call(c, "init_server", _view(at, {}, c)) for c in self.components}
        if (c := self.received) is not None:
            check_models(c, slices[c.name], at)
        return State(at.params, at.buffers, slices)

    def begin(self, state: State, at: Server) -> Generator[Ask, Reply, State]:
        """Exchanges about w_0, with everybody (`at.cohort`); w_0 may change."""
        at = replace(at, params=state.params, buffers=state.buffers)
        slices, params = yield from self._survey(at, state.slices)
        return state._replace(slices=slices, params=params or state.params)

    def round(self, state: State, at: Server) -> Generator[Ask, Reply, RoundResult]:
        """One round with the clients `at.cohort`, or those that a component chooses."""
        slices, components = state.slices, self.components
        now = replace(at, params=state.params, buffers=state.buffers)
        if (chooser := self.chooser) is not None:
            cohort = yield from _asked(chooser, "choose", _view(now, slices, chooser))
            now = replace(now, cohort=cohort or now.cohort)

        def each(hook: str) -> dict[Component, Any]:
            # A hook that no component brings reads nothing.
            return {
                c: call(c, hook, _view(now, slices, c) if overrides(c, hook) else now)
                for c in components
            }

        if (owner := self.received) is not None:
            change = yield from _asked(owner, "assign", _view(now, slices, owner))
            state_of_owner = slices[owner.name] | (change or Change()).state
            slices = slices | {owner.name: state_of_owner}
        shared, each_client = _named(each("broadcast")), _named(each("message"))
        ask = Ask(TRAIN, now.cohort, now.params, now.buffers, shared, each_client)
        replies = yield self.with_models(ask, slices)
        _refuse_uploads(components, replies)
        now = replace(now, start=now.params, replies=replies, trained=replies.deltas)
        refined: dict[Component, Reply | None] = {}
        for c in components:
            refined[c] = yield from _asked(c, "refine", _view(now, slices, c))
        refined_update = self.owned(Exclusive.REFINEMENT, refined)
        if refined_update is not None:
            anew = {c: reply.upload for c, reply in refined.items() if reply is not None}
            now = replace(
                now, replies=replace(refined_update, upload=replies.upload | _named(anew))
            )

        omega = (torch.ones_like(replies.n) if self.uniform else replies.n).double()
        base = weights = omega / omega.sum()  # [M]
        for factor in each("weigh").values():
            if factor is not None:  # 1 on average: where all are the same, `omega` keeps its bits
                factor = factor.double() / (weights @ factor.double())
                omega, weights = omega * factor, weights * factor
        now = replace(now, base=base, omega=omega, weights=weights)
        average = self.owned(Exclusive.AVERAGE, each("average"))
        answers, trained = now.replies, now.trained
        now = replace(
            now,
            update=weighted_mean(omega, answers.deltas)
            if average is None
            else {name: average[name] for name in now.start},
        )
        if any(_hides(c, "client") for c in components):
            now = replace(now, replies=absent(NO_REPLIES), trained={})

        steps = each("step")
        slices = {c.name: slices[c.name] | steps[c].state for c in components}
        sent = self.owned(Exclusive.SERVER_STEP, {c: step.params for c, step in steps.items()})
        evaluated = self.owned(
            Exclusive.SERVER_STEP, {c: step.evaluated for c, step in steps.items()}
        )
        buffers = self.owned(
            Exclusive.SERVER_STEP, {c: step.buffers for c, step in steps.items()}
        ) or {name: leaf for name, leaf in (average or {}).items() if name in now.buffers}
        now = replace(
            now,
            params=add(now.start, now.update) if sent is None else sent,
            buffers=buffers or weighted_mean(omega, answers.buffers),
        )

        learned = each("learn")
        model = self.owned(Exclusive.SERVER_LEARNING, learned)
        if model is not None:
            slices = {c.name: slices[c.name] | (learned[c] or Change()).state for c in components}
            # The learner went on from the model that would be sent.
            now, evaluated = (
                replace(
                    now, params=model.params or now.params, buffers=model.buffers or now.buffers
                ),
                None,
            )
        slices, _ = yield from self._survey(now, slices)
        metrics = {c: step.metrics for c, step in steps.items()}
        return RoundResult(
            State(now.params, now.buffers, slices), evaluated, _named(metrics), trained, weights
        )

    def models(self, slices: Tree) -> Tree:
        """The models with which clients are tested in place of one, and whose is which."""
        if (c := self.received) is None or not self._tests_received:
            return {}
        return {name: slices[c.name][name] for name in (MODELS, MODEL_OF)}

    def with_models(self, ask: Ask, slices: Tree) -> Ask:
        """An Ask to train or to test, with the models that clients have in place of w_t if a
        component sends such.

        RecipeError for a number that is of no model.
        """
        if (c := self.received) is None or not (ask.job == TRAIN or self._tests_received):
            return ask
        models, model_of = slices[c.name][MODELS], slices[c.name][MODEL_OF]
        # [M], on the host once for all clients: a GPU's host would wait for each.
        numbers = model_of.cpu()[torch.tensor(ask.to)]
        k = len(next(leaves(models)))
        if not bool(((numbers >= 0) & (numbers < k)).all()):
            raise RecipeError(
                f"{c.name!r}: {MODEL_OF} = {numbers.tolist()} of clients {list(ask.to)}",
                allowed=f"numbers of its models, 0 to {k - 1}",
            )
        return ask._replace(shared=ask.shared | {MODELS: models}, each=ask.each | {MODELS: numbers})

    def finish(self, state: State, at: Server) -> Generator[Ask, Reply, State]:
        """Exchanges after the last round, with everybody; `state.params` is the evaluated model,
        which may change."""
        now, changes = replace(at, params=state.params, buffers=state.buffers), {}
        for c in self.components:
            changes[c] = yield from _asked(c, "finish", _view(now, state.slices, c))
        change = self.owned(Exclusive.CLASSIFIER, changes)
        return state if change is None else state._replace(params=change.params or state.params)

    def _survey(
        self, now: Server, slices: Tree
    ) -> Generator[Ask, Reply, tuple[Tree, Params | None]]:
        """(the components' next state, the model in place of w_0)."""
        changed, models = dict(slices), {}
        for c in self.components:
            outcome = yield from _asked(c, "survey", _view(now, slices, c))
            change = outcome or Change()
            changed[c.name] = slices[c.name] | change.state
            models[c] = change.params
        return changed, self.owned(Exclusive.CLASSIFIER, models)


def _check(c: Component, setting: Setting) -> None:
    """RecipeError if a component can't run, breaks the contract, or changes more than it owns."""
    check_kind(c)
    c.check(setting)
    for hook, claim in OWNS.items():
        if overrides(c, hook):
            _check_owner(c, claim)
    if c.packing is not None:
        _check_owner(c, Exclusive.UPDATE)
    for holds, what, allowed in _limits(c, setting):
        if holds:
            raise RecipeError(f"{c.name!r} {what}", allowed=allowed)


def _limits(c: Component, setting: Setting) -> list[tuple[bool, str, str]]:
    """(whether it holds, what is wrong with a component here, what is allowed) of every rule."""
    needs, silos = c.needs, setting.deployed
    split = bool({HEAD, BODY} & needs.personal)
    return [
        (
            overrides(c, "finish") and not overrides(c, "exchanges"),
            "has `finish`, which is called only where `exchanges` counts it",
            "`exchanges` that returns Exchanges(finish=1)",
        ),
        (
            (needs.features or needs.classifier or split) and not setting.features,
            "needs a linear classifier that is trained, with features before it, and the network "
            "has none",
            "a network whose logits are a linear layer's output",
        ),
        (
            overrides(c, "refine") and needs.replies != Replies.MODELS,
            "replaces clients' models in `refine`",
            "with Needs(replies=Replies.MODELS)",
        ),
        (
            bool(setting.no_sample_gradients) and Algorithm((c,)).per_sample is not None,
            f"takes the gradient of each sample by itself, and {setting.no_sample_gradients}",
            "a network without batch norms, dropout and recurrent layers",
        ),
        (
            needs.activations and not setting.activations,
            "needs the activations of all layers, which the network does not tell",
            "one of ours",
        ),
        (
            needs.classes and not setting.classes,
            "needs targets that are classes, and this loss has none",
            "cross_entropy, or a method without classes",
        ),
        (
            silos and overrides(c, "choose") and setting.cohort == setting.n_clients,
            f"chooses the clients of a round, and all {setting.n_clients} silos take part",
            "a cohort of fewer silos",
        ),
        (
            silos and needs.pooled,
            "is for simulations and can't be deployed: it trains one model on the data of all, "
            "which may not leave their silos",
            "",
        ),
        (
            silos and needs.public is Public.TEST_SET,
            "is for simulations and can't be deployed: it trains on the test set",
            "",
        ),
    ]


def _unsound(a: Component, b: Component) -> str:
    """Why `a` can't be combined with `b`, in what they need; "" if it can."""
    mine, other = a.needs, b.needs
    one_model = _of_one_model(b)
    kept = " and ".join(sorted(KEPT.get(part, part) for part in mine.personal))
    rules = {
        f"{a.name!r} sends clients models of its own in place of w_t, and {b.name!r} {one_model}": (
            Exclusive.RECEIVED in a.exclusive and one_model
        ),
        f"{b.name!r} changes the server's one model, and with {a.name!r} no client has it": (
            {Exclusive.RECEIVED, Exclusive.OWN_MODEL} <= a.exclusive and b.exclusive & OF_SERVER
        ),
        f"{a.name!r} trains one model on all data, so there are no clients for another method to "
        "act on": mine.pooled,
        f"{a.name!r} averages no model, so there is none for another method to act on": (
            {HEAD, BODY} <= mine.personal
        ),
        f"{a.name!r} takes no local step, so there is no training for another method to act on": (
            mine.no_training
        ),
        f"{a.name!r} fixes the layers before the classifier, so nothing would be averaged": (
            mine.fixed_body and (other.fixed_classifier or HEAD in other.personal)
        ),
        f"{a.name!r} compresses updates, and {b.name!r} lets clients send whole models again": (
            a.packing is not None and overrides(b, "refine") and overrides(b, "answer")
        ),
        f"{a.name!r} keeps the {kept} on the clients, and {b.name!r} needs whole models outside of "
        "local training": mine.personal and other.whole_models,
        f"{a.name!r} makes a client's own model of the received one and a part that it keeps, "
        f"{b.name!r} in another way, and a client is tested with one": (
            mine.personal and overrides(b, "own_model")
        ),
        f"{a.name!r} starts local training elsewhere than at the received model, from where "
        f"{b.name!r} counts a client's way": (
            Exclusive.START in a.exclusive and (Exclusive.DRIFT in b.exclusive or other.steps)
        ),
        f"the clients of {a.name!r} take steps that leave the shared part as it is, and {b.name!r} "
        "counts them in a client's way": mine.personal_first and other.steps,
        f"{a.name!r} keeps the {KEPT[HEAD]} on the clients, and {b.name!r} needs one that all "
        "share": HEAD in mine.personal and (other.classifier or other.fixed_classifier),
    }
    return next((why for why, holds in rules.items() if holds), "")


def _of_one_model(c: Component) -> str:
    """What a component takes all clients' one model for, in words; "" if nothing."""
    sends = "sends all of them what belongs to one model"
    reasons = {
        "broadcast": sends,
        "message": sends,
        "refine": "trains them again from one",
        "answer": "asks them about one",
    }
    if c.needs.replies == Replies.MODELS:
        return "adds their updates to one"
    return next((why for hook, why in reasons.items() if overrides(c, hook)), "")


def _refuse_uploads(components: Iterable[Component], replies: Reply) -> None:
    """RecipeError if clients send more than their updates, and noise in the sum must hide them."""
    sent = [name for name, tree in replies.upload.items() if tree]
    for c in components:
        if sent and _hides(c, "client"):
            raise RecipeError(
                f"{c.name!r} hides each client by noise in the sum of the updates, and {sent[0]!r} "
                "sends more than the update; drop one of them"
            )


def _hides(c: Component, unit: str) -> bool:
    return c.mechanism is not None and c.mechanism.unit == unit


def _exposed(a: Component, b: Component) -> str:
    """Why `b` would tell what the noise of `a` hides; "" if it would not."""
    others = b.needs.local_set or b.needs.gradient or b.needs.loss or overrides(b, "own_model")
    if _hides(a, "sample") and (others or overrides(b, "choose")):
        return (
            f"{a.name!r} hides each sample by noise in the gradients of local training, and "
            f"{b.name!r} reads the samples in another way, without that noise"
        )
    more = overrides(b, "answer") or overrides(b, "weigh") or b.needs.replies != Replies.SUMS
    if _hides(a, "client") and more:
        return (
            f"{a.name!r} hides each client by noise in the sum of the updates, and {b.name!r} "
            "takes more of a client than its bounded update"
        )
    return ""


def _check_owner(c: Component, claim: Exclusive) -> None:
    if claim not in c.exclusive:
        raise RecipeError(
            f"{c.name!r} changes the {claim.value[0]} without owning it; add {claim} to `exclusive`"
        )


def _named(by_component: dict[Component, T]) -> dict[str, T]:
    return {c.name: result for c, result in by_component.items()}


def _view(now: Server, slices: Tree, c: Component) -> Server:
    """The server as one component sees it: its own state, key and uploads, and the data that it
    declares."""
    public = now.public if c.needs.public is not Public.NOTHING else Server.public
    replies, trained = now.replies, now.trained
    if isinstance(replies, Reply):
        replies = _seen(replies, c, now.omega)
    if c.needs.replies != Replies.MODELS:
        trained = hidden(trained, _by(c, now.omega))
    return replace(
        now,
        state=slices.get(c.name, {}),
        public=public,
        replies=replies,
        trained=trained,
        scope=identity(c),
    )


def _by(c: Component, omega: Any) -> tuple[Any, ...] | None:
    """The weights by which a component may add up; None: any. `omega`: the clients'."""
    if c.needs.replies != Replies.SUMS:
        return None
    return (omega, None) if c.weights == "uniform" else (omega,)


def _seen(reply: Reply, c: Component, omega: Any = None) -> Reply:
    """The answers as one component sees them; `omega`: the clients' weights, after training."""
    needs, own = c.needs.replies, reply.upload.get(c.name, {})
    if needs == Replies.MODELS:
        return replace(reply, upload=own)
    sums, weights = needs == Replies.SUMS, _by(c, omega)
    uploads = (None,) if c.needs.unweighted else weights
    return replace(
        reply,
        deltas=hidden(reply.deltas, weights),
        buffers=hidden(reply.buffers, weights),
        upload=hidden(own, uploads) if sums else own,
    )


def _asked(c: Component, hook: str, server: Server) -> Generator[Ask, Reply, Any]:
    """Passes the Asks of a hook on, addressed to its component on the clients; returns what the
    hook returns."""
    asks = call(c, hook, server)
    if not isinstance(asks, Generator):
        return asks
    reply: Reply | None = None
    while True:
        answer = None if reply is None else _seen(reply, c)
        try:
            # Until the reply, the engine may take the memory of earlier ones again.
            with watching(c, hook, server, answer) if is_foreign(c) else nullcontext():
                ask = asks.send(answer)
        except StopIteration as stop:
            return checked(c, hook, stop.value, server)
        except Exception as error:  # of any kind: the code is the method's
            raise failure(c, hook, error) from error
        if not is_sound(ask, server) or ask.job == TRAIN:
            allowed = (
                "an Ask with a word of its own as the job, which is not 'train'; to ascending "
                "clients; with no model or one of the server's shapes; `each` with a row for each"
            )
            raise RecipeError(f"{c.name!r}: {hook} yielded {described(ask)}; allowed: {allowed}")
        reply = yield ask._replace(
            shared={c.name: ask.shared}, each={c.name: ask.each}, owner=c.name
        )
