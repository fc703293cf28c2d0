"""Algorithm: a set of components, and the federated round as a generator of Asks. FedAvg is the empty set."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

import torch

from plugins.core.component import Ask, Asks, Component, Exchanges, RecipeError, Server, Steps, Update
from plugins.core.trees import Params, add, tree_map, weighted_sum


@dataclass(frozen=True)
class Algorithm:
    """What every runtime runs. `a+b` equals `b+a`: components are kept in the order (stage, name)."""

    components: tuple[Component, ...] = ()

    @staticmethod
    def compose(components: Iterable[Component]) -> Algorithm:
        """Composes, or raises RecipeError that names both components and what they both claim."""
        ordered = tuple(sorted(components, key=lambda c: (c.stage, c.name)))
        for a, b in combinations(ordered, 2):
            if a.name == b.name:
                raise RecipeError(f"recipe names {a.name!r} twice; a recipe is a set, name each method once")
            if clash := a.claims & b.claims:
                raise RecipeError(
                    f"{a.name!r} and {b.name!r} can't be combined: "
                    f"both own the {', '.join(sorted(clash))}; drop one of them"
                )
        return Algorithm(ordered)

    @property
    def name(self) -> str:
        """The recipe's canonical name."""
        return "+".join(sorted(c.name for c in self.components)) or "fedavg"

    @property
    def passes(self) -> frozenset[str]:
        """The extra passes over data that some component makes."""
        return frozenset().union(*(c.passes for c in self.components))

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

    def init(self, params: Params, buffers: Params) -> Server:
        """The server before anything was sent."""
        return Server(params, buffers, {c.name: c.init_server(params) for c in self.components})

    def init_client(self, params: Params) -> dict[str, dict[str, object]]:
        """The memory of a client that has not taken part yet, by component."""
        return {c.name: c.init_client(params) for c in self.components}

    def begin(self, server: Server, clients: tuple[int, ...]) -> Asks:
        """Exchanges before the first round, with all clients; returns the server."""
        for c in self.components:
            server = yield from c.begin(server, clients)
        return server

    def round(self, server: Server, cohort: tuple[int, ...]) -> Asks:
        """One round with the clients `cohort`, ascending; returns (next server, evaluated parameters)."""
        state = server.state
        replies = yield Ask(
            "train",
            cohort,
            server.params,
            server.buffers,
            shared={c.name: c.broadcast(state[c.name]) for c in self.components},
            each={c.name: c.address(state[c.name], cohort) for c in self.components},
        )
        for c in self.components:
            replies = yield from c.after_train(server, replies)

        uniform = any(c.weighting == "uniform" for c in self.components)
        n = torch.ones_like(replies.n) if uniform else replies.n
        weights = n.double() / n.double().sum()  # [M]
        for c in self.components:
            weights = c.weigh(weights, replies)

        deltas = tree_map(lambda w_k, w: w_k - w, replies.params, server.params)  # [M, ...]
        direction = average = weighted_sum(weights, deltas)
        update, next_state = Update(replies, deltas, weights), {}
        for c in self.components:
            direction, next_state[c.name] = c.step(direction, state[c.name], update)
        sent = add(server.params, direction)
        averages = any(c.evaluates_average for c in self.components)
        evaluated = add(server.params, average) if averages else sent
        server = Server(sent, weighted_sum(weights, replies.buffers), next_state)
        for c in self.components:
            server = yield from c.after_step(server, cohort)
        return server, evaluated

    def finish(self, server: Server, clients: tuple[int, ...]) -> Asks:
        """Exchanges after the last round, with all clients; returns the server."""
        for c in self.components:
            server = yield from c.finish(server, clients)
        return server
