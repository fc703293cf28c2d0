"""Algorithm: a set of components, and the federated round as a generator of Asks. FedAvg is the empty set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from plugins.core.component import (
    CLAIMS,
    Ask,
    Asks,
    Component,
    Desk,
    Exchanges,
    RecipeError,
    Reply,
    Round,
    Server,
    Steps,
    Update,
)
from plugins.core.cores import all_cores
from plugins.core.optimizers import Optimizer
from plugins.core.task import Network
from plugins.core.trees import Params, add, tree_map, weighted_sum


@dataclass(frozen=True)
class Algorithm:
    """What every runtime runs. `a+b` equals `b+a`: components are kept in the order (stage, name)."""

    components: tuple[Component, ...] = ()

    @staticmethod
    def compose(components: Iterable[Component]) -> Algorithm:
        """Composes, or raises RecipeError that names both components, what they both claim, and why that can't be."""
        ordered = tuple(sorted(components, key=lambda c: (c.stage, c.name)))
        for a, b in combinations(ordered, 2):
            if a.name == b.name:
                raise RecipeError(f"recipe names {a.name!r} twice; a recipe is a set, name each method once")
            for one, other in ((a, b), (b, a)):
                if one.pools:
                    raise RecipeError(
                        f"{one.name!r} and {other.name!r} can't be combined: {one.name!r} trains one model on all "
                        "data, so there are no clients for another method to act on; drop one of them"
                    )
            if clash := sorted(a.claims & b.claims):
                why = "; ".join(f"both own the {claim}, and {CLAIMS.get(claim, 'only one can')}" for claim in clash)
                raise RecipeError(f"{a.name!r} and {b.name!r} can't be combined: {why}; drop one of them")
        return Algorithm(ordered)

    @property
    def name(self) -> str:
        """The recipe's canonical name."""
        return "+".join(sorted(c.name for c in self.components)) or "fedavg"

    @property
    def passes(self) -> frozenset[str]:
        """The extra passes over data that some component makes."""
        return frozenset().union(*(c.passes for c in self.components))

    @property
    def pools(self) -> bool:
        """Whether one client has the data of all."""
        return any(c.pools for c in self.components)

    @property
    def public(self) -> str:
        """What the recipe sees of the public split: "labelled" or "unlabelled" samples, or "" for nothing."""
        seen = {c.public for c in self.components}
        return next((kind for kind in ("labelled", "unlabelled") if kind in seen), "")

    @property
    def leak(self) -> str:
        """What of the test set the recipe sees, in words; "" if nothing."""
        return "; ".join(c.leak for c in self.components if c.leak)

    @property
    def simulation_only(self) -> str:
        """Why the recipe may not be deployed on real silos, in words; "" if it may."""
        return "; ".join(c.simulation_only for c in self.components if c.simulation_only)

    def optimizer(self, given: Optimizer) -> Optimizer:
        """The optimiser of local training."""
        for c in self.components:
            given = c.optimizer(given)
        return given

    def fixed(self, network: Network) -> frozenset[str]:
        """Names of parameters that stay at their initial values."""
        return frozenset().union(*(c.fixed(network) for c in self.components))

    def shared(self, n_public: int) -> int:
        """How many samples of the public split every client has beside its own."""
        return max((c.shared(n_public) for c in self.components), default=0)

    def owner(self, job: str) -> Component:
        """The component that answers `job`, which is named "<component>.<what>"."""
        return next(c for c in self.components if c.name == job.partition(".")[0])

    def public_steps(self, job: str) -> Steps | None:
        """The training on public data that `job` brings along."""
        return None if job == "train" else self.owner(job).public_steps(job)

    def exchanges(self, cohort: int) -> Exchanges:
        """Asks before the first round, in every round, and after the last."""
        parts = [c.exchanges(cohort) for c in self.components]
        return Exchanges(sum(p.begin for p in parts), 1 + sum(p.round for p in parts), sum(p.finish for p in parts))

    def init(self, params: Params, buffers: Params, desk: Desk) -> Server:
        """The server before anything was sent."""
        return Server(params, buffers, {c.name: c.init_server(params, desk) for c in self.components})

    def begin(self, server: Server, clients: tuple[int, ...]) -> Asks:
        """Exchanges before the first round, with all clients; returns the server."""
        for c in self.components:
            server = yield from c.begin(server, clients)
        return server

    def round(self, server: Server, cohort: tuple[int, ...], desk: Desk) -> Asks:
        """One round with the clients `cohort`, ascending; returns a Round."""
        start, state = server.params, server.state
        replies: Reply = yield Ask(
            "train",
            cohort,
            start,
            server.buffers,
            shared={c.name: c.broadcast(state[c.name]) for c in self.components},
            each={c.name: c.address(state[c.name], cohort) for c in self.components},
        )
        trained = replies
        for c in self.components:
            replies = yield from c.after_train(server, replies)

        uniform = any(c.weighting == "uniform" for c in self.components)
        n = torch.ones_like(replies.n) if uniform else replies.n
        weights = n.double() / n.double().sum()  # [M]
        for c in self.components:
            weights = c.weigh(weights, replies)

        refined = replies.params is not trained.params
        if any(c.reads_models for c in self.components):
            deltas = _deltas(replies.params, start)
            unrefined = _deltas(trained.params, start) if refined else deltas
        else:
            deltas = _deltas_in_place(replies.params, start)
            unrefined = _deltas_in_place(trained.params, start) if refined else deltas
            replies = replies._replace(params={})
        update = Update(replies, deltas, weights, unrefined, _deltas(replies.buffers, server.buffers))
        own = [found for c in self.components if (found := c.average(update)) is not None]
        direction = own[0] if own else weighted_sum(weights, deltas)  # a claim sees to it that there is but one
        average, next_state = None, {}
        for c in self.components:
            if c.evaluates_average:
                average = direction
            direction, next_state[c.name] = c.step(direction, state[c.name], update)
        sent = add(start, direction)
        evaluated = sent if average is None else add(start, average)
        measured = {c.name: c.measure(next_state[c.name], update) for c in self.components}

        server = Server(sent, weighted_sum(weights, replies.buffers), next_state)
        for c in self.components:
            server = yield from c.after_step(server, update, desk)
        if server.params is not sent:
            evaluated = server.params  # a learner on the server (FedDF, FedFTG) went on from what would be sent
        return Round(server, evaluated, measured, unrefined)

    def finish(self, server: Server, evaluated: Params, clients: tuple[int, ...], desk: Desk) -> Asks:
        """Exchanges after the last round, with all clients; returns (server, evaluated parameters)."""
        if all(type(c).finish is Component.finish for c in self.components):
            return server, evaluated
        # Nothing is sent to be trained any more: what counts from here on is the model that is evaluated.
        server = server._replace(params=evaluated)
        for c in self.components:
            server = yield from c.finish(server, clients, desk)
        return server, server.params


def _deltas(params: Params, start: Params) -> Params:
    """w_k - w_t, [M, ...]."""
    return tree_map(lambda w_k, w: w_k - w, params, start)


def _deltas_in_place(params: Params, start: Params) -> Params:
    """w_k - w_t in the place of w_k: all clients' models beside their differences are a large part of a round."""

    def minus(w_k: Tensor, w: Tensor) -> Tensor:
        with all_cores(w_k):
            return w_k.sub_(w)

    return tree_map(minus, params, start)
