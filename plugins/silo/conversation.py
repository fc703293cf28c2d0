"""Both halves of a cross-silo run, without FedML: the server's suspended rounds, and a silo that answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence

import numpy as np
import torch

from plugins.core.component import Ask, Reply, Samples
from plugins.core.errors import NonFiniteError, UserError
from plugins.core.trees import Params, Tree, norm, row, row_norms, stack, sub, tree_map
from plugins.engines.clients import Clients, refuse_non_finite
from plugins.engines.evaluation import evaluate
from plugins.engines.sequential import Sequential
from plugins.engines.simulation import Outcome, draw_cohort, initial_model
from plugins.engines.traffic import Meter
from plugins.silo import wire
from plugins.silo.settings import Terms
from plugins.silo.wire import Down, Up


class _OwnShard(Clients):
    """The one client of a silo."""

    def hold(self, ask: Ask, clients: Sequence[int], params: Params, buffers: Params) -> None:
        """Always: whether a round goes on depends on the whole cohort, and a silo sees itself only."""
        for position, client in enumerate(clients):
            self.held[client] = (row(params, position), row(buffers, position))


class Silo:
    """Answers the Asks of a run from its own shard, with the sequential engine."""

    def __init__(self, terms: Terms, client: int, train: Samples, public: Samples | None) -> None:
        """`client` counts from 0; `train` is this silo's shard."""
        self.terms, self.client = terms, client
        params, _ = initial_model(terms.network, terms.seed, train.x)
        # Orders of batches are drawn over positions, so a shard by itself is read as it is within a simulation.
        indices = {client: np.arange(len(train.y))}
        self.engine = Sequential(
            _OwnShard(terms.algorithm, terms.task, terms.local, terms.seed, train, indices, public, params)
        )

    def answer(self, down: Down) -> Tree | None:
        """This silo's reply, keys as in `wire.PARTS`; None if it was not asked. Raises NonFiniteError, UserError."""
        if down.terms != self.terms.fingerprint:
            raise UserError(
                f"silo {self.client} (rank {self.client + 1}): its configuration is not the server's; train_args, "
                "model_args, random_seed and threads must be the same in both files"
            )
        ask = down.ask
        if ask is None or self.client not in ask.to:
            return None
        reply = self.reply(ask, ask.to.index(self.client), down.round)
        refuse_non_finite(reply, down.round)
        return row(self.parts(reply), 0)

    def reply(self, ask: Ask, position: int, round_: int) -> Reply:
        """The reply [1, ...] to the row `position` of an Ask."""
        device = self.engine.clients.device
        params, buffers, shared, each = (
            tree_map(lambda leaf: leaf.to(device), tree) for tree in (ask.params, ask.buffers, ask.shared, ask.each)
        )
        each = row(each, torch.tensor([position], device=device))
        return self.engine.answer(Ask(ask.job, (self.client,), params, buffers, shared, each), round_)

    @staticmethod
    def parts(reply: Reply) -> Tree:
        """What travels of a reply, on the CPU."""
        cpu: Tree = tree_map(torch.Tensor.cpu, {key: getattr(reply, key) for key in wire.PARTS})
        return cpu


class Conversation:
    """The server of a run: `down` is what to send; `open` and `feed` take what came back and make the next one."""

    def __init__(
        self,
        terms: Terms,
        test: Samples,
        validation: Samples | None,
        has_public: bool,
        settle: Callable[[Params], Params] = lambda params: params,
        on_round: Callable[[Mapping[str, float]], None] | None = None,
    ) -> None:
        """`settle` changes the model at the end of a round, before it is evaluated and sent (privacy, defences)."""
        self.terms, self.test, self.validation, self.settle, self.on_round = terms, test, validation, settle, on_round
        params, buffers = initial_model(terms.network, terms.seed, test.x)
        self.server = terms.algorithm.init(params, buffers)
        self.rows: list[dict[str, float]] = []
        self.outcome: Outcome | None = None
        self._round = self._exchange = 0
        self._meter = Meter()
        self._seen: dict[str, torch.Tensor] = {}
        # One silo with one sample that is always at hand: what it replies declares the structure of every upload.
        sample = Samples(test.x[:1], test.y[:1])
        self._probe = Silo(terms, 0, sample, sample if has_public else None)
        self._schemas: dict[str, Tree] = {}
        self._asks = self._rounds()
        self._ask: Ask | None = None  # as the algorithm made it; the meter tells models apart by identity
        self.down = self._next(None)

    def open(self, uploads: Mapping[int, Up]) -> dict[int, Tree]:
        """The checked replies of the clients that were asked, ascending. Raises UserError that names a silo."""
        job = self.down.ask.job if self.down.ask else ""
        schema = self._schemas.get(job, {})
        found = {client: wire.opened(uploads[client], client, self.down, schema) for client in sorted(uploads)}
        return {client: reply for client, reply in found.items() if reply is not None}

    def feed(self, replies: Mapping[int, Tree]) -> Down:
        """Goes on with these replies, and returns what to send next."""
        ask = self._ask
        if ask is None:
            return self.down
        if not replies:
            raise UserError(f"round {self._round}: no silo is left to average")
        clients = tuple(sorted(replies))
        reply = Reply(clients, **stack([replies[client] for client in clients]))
        refuse_non_finite(reply, self._round)
        self._meter.count(ask, reply)
        if ask.job == "train":
            self._seen["loss"] = reply.loss.mean()
            self._seen["moved"] = row_norms(tree_map(torch.sub, reply.params, ask.params)).mean()
        self.down = self._next(reply)
        return self.down

    def _next(self, reply: Reply | None) -> Down:
        self._exchange += reply is not None
        try:
            with torch.no_grad():
                ask = next(self._asks) if reply is None else self._asks.send(reply)
        except StopIteration:
            self._ask = None
            return wire.down(self._exchange, self._round, None, self.terms.fingerprint)
        self._ask = ask
        if ask.job not in self._schemas:
            self._schemas[ask.job] = row(Silo.parts(self._probe.reply(ask, 0, self._round)), 0)
        return wire.down(self._exchange, self._round, ask, self.terms.fingerprint)

    def _rounds(self) -> Generator[Ask, Reply, None]:
        terms, algorithm = self.terms, self.terms.algorithm
        everybody = tuple(range(terms.silos))
        self.server = yield from algorithm.begin(self.server, everybody)
        for t in range(1, terms.rounds + 1):
            began, self._round = time.perf_counter(), t
            start, cohort = self.server.params, draw_cohort(terms.seed, t, terms.silos, terms.cohort)
            server, evaluated = yield from algorithm.round(self.server, cohort)
            if t == terms.rounds:
                server = yield from algorithm.finish(server, everybody)
            settled = self.settle(server.params)
            evaluated = settled if evaluated is server.params else self.settle(evaluated)
            self.server = server._replace(params=settled)
            self.rows.append(self._row(t, start, evaluated, began))
            if self.on_round is not None:
                self.on_round(self.rows[-1])
        self.outcome = Outcome(self.server.params, evaluated, self.server.buffers, self.rows)

    def _row(self, t: int, start: Params, evaluated: Params, began: float) -> dict[str, float]:
        """A row of rounds.csv, columns as in a simulation; `seconds` include the waiting for the silos."""
        moved = norm(sub(self.server.params, start)).item()
        if not math.isfinite(moved):
            raise NonFiniteError(f"round {t}, server: the update is not finite; lower the learning rate")
        found: dict[str, float] = {"round": t}
        for name, samples in (("test", self.test), ("validation", self.validation)):
            look = evaluate(self.terms.network, evaluated, self.server.buffers, samples) if samples else None
            found[f"{name}_accuracy"] = look.accuracy if look else math.nan
            found[f"{name}_loss"] = look.loss if look else math.nan
        up, down = self._meter.read()
        return found | {
            "local_loss": self._seen["loss"].item(),
            "update_norm_client": self._seen["moved"].item(),
            "update_norm_server": moved,
            "bytes_up": up,
            "bytes_down": down,
            "seconds": time.perf_counter() - began,
        }
