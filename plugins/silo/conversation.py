"""Both halves of a cross-silo run, without FedML: the server's suspended rounds, and a silo that answers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping

import numpy as np
import torch

from plugins.core.component import Ask, Reply
from plugins.core.data import Samples
from plugins.core.errors import UserError
from plugins.core.trees import Params, Tree, row, tree_map
from plugins.engines.clients import Clients, refuse_non_finite
from plugins.engines.packing import stack
from plugins.engines.record import Recorder
from plugins.engines.run import Outcome, Row, Run
from plugins.engines.sequential import Sequential, plain
from plugins.engines.simulation import start, with_shared
from plugins.silo import wire
from plugins.silo.settings import Terms
from plugins.silo.wire import Down, Up


class _OwnShard(Clients):
    """The one client of a silo."""

    def holds(self, ask: Ask) -> bool:
        """Always for training: the whole cohort decides whether a round goes on, and a silo sees only itself."""
        return ask.job == "train"


class Silo:
    """Answers the Asks of a run from its own shard, with the sequential engine.

    An answer changes the silo's memory. The change is pending until the next message says whether the server counted
    the answer. If a defence dropped the answer, the silo goes back to the memory from before it. Otherwise the states
    of server and silos, such as SCAFFOLD's c and c_i, would differ.
    """

    def __init__(self, terms: Terms, client: int, train: Samples, public: Samples | None) -> None:
        """`client` counts from 0; `train` is this silo's shard."""
        self.terms, self.client = terms, client
        task, params, buffers = start(terms.algorithm, terms.network, terms.local, terms.schedule.seed, train.x)
        # Batches are drawn as positions within a shard. So this shard is read in the same order as in a simulation.
        self._public = public
        own = self._arranged(train)
        indices = {client: np.arange(len(own.y))}
        self.engine = Sequential(
            _OwnShard(terms.algorithm, task, terms.local, terms.schedule.seed, own, indices, public, params, buffers)
        )
        self._pending: tuple[Down, Tree] | None = None  # the last message answered, and the memory from before it

    def _arranged(self, train: Samples) -> Samples:
        return with_shared(self.terms.algorithm, train, [], self._public)[0]

    def read(self, train: Samples) -> None:
        """Replaces the shard by one with as many samples, perhaps poisoned by an attack."""
        self.engine.clients.train = self._arranged(train)

    def answer(self, down: Down) -> Tree | None:
        """This silo's reply, keys as in `wire.PARTS`; None if it was not asked. Raises NonFiniteError, UserError."""
        if down.terms != self.terms.fingerprint:
            raise UserError(
                f"silo {self.client} (rank {self.client + 1}): its configuration is not the server's; train_args, "
                "model_args, random_seed and threads must be the same in both files"
            )
        self._settle(down)
        ask = down.ask
        if ask is None or self.client not in ask.to:
            return None
        self._pending = down, tree_map(torch.clone, self.engine.clients.memory)
        reply = self.reply(ask, ask.to.index(self.client), down.round)
        refuse_non_finite(reply, down.round)
        return row(self.parts(reply), 0)

    def _settle(self, down: Down) -> None:
        """Keeps the memory of the last answer, or goes back to the memory from before it."""
        if self._pending is None:
            return
        answered, memory = self._pending
        self._pending = None
        again = down.exchange == answered.exchange  # a message that comes twice gets the same answer twice
        if again or self.client not in down.counted:
            clients = self.engine.clients
            clients.memory = memory
            if answered.ask is not None and answered.ask.job == "train":
                clients.held.clear()  # nothing may go on from a training that does not count

    def reply(self, ask: Ask, position: int, round_: int) -> Reply:
        """The reply [1, ...] to the row `position` of an Ask."""
        device = self.engine.clients.device
        here = wire.mapped(lambda leaf: leaf.to(device), ask)
        own = here._replace(to=(self.client,), each=row(here.each, torch.tensor([position], device=device)))
        return self.engine.answer(own, round_)

    @staticmethod
    def parts(reply: Reply) -> Tree:
        """The parts of a reply that are sent, on the CPU."""
        cpu: Tree = tree_map(torch.Tensor.cpu, {key: getattr(reply, key) for key in wire.PARTS})
        return cpu


class Conversation:
    """The server of a run: `down` is the message to send; `open` and `feed` take the uploads and make the next one."""

    def __init__(
        self,
        terms: Terms,
        test: Samples,
        validation: Samples | None,
        public: Samples | None,
        settle: Callable[[Params], Params] = lambda params: params,
        on_round: Callable[[Mapping[str, float]], None] | None = None,
    ) -> None:
        """`settle` changes the model at the end of a round, before it is evaluated and sent (privacy, defences)."""
        self.terms, self.on_round = terms, on_round
        task, params, buffers = start(terms.algorithm, terms.network, terms.local, terms.schedule.seed, test.x)
        recorder = Recorder(task, test, validation)
        self.loop = Run(
            terms.algorithm, plain(task), params, buffers, terms.silos, terms.schedule, recorder, public, test.x, settle
        )
        self.outcome: Outcome | None = None
        self._round = self._exchange = 0
        # A silo with one test sample: its replies give the structure that every upload must have.
        sample = Samples(test.x[:1], test.y[:1])
        self._probe = Silo(terms, 0, sample, sample if public is not None else None)
        self._schemas: dict[str, Tree] = {}
        self._asks = self._rounds()
        self._ask: Ask | None = None  # the algorithm's own object: the meter tells models apart by identity
        self.down = self._next(None)

    @property
    def rows(self) -> list[Row]:
        """The rows of rounds.csv so far."""
        return self.loop.recorder.rows

    def open(self, uploads: Mapping[int, Up]) -> dict[int, Tree]:
        """The checked replies of the clients that were asked, ascending. Raises UserError that names a silo."""
        schema = {} if self.down.ask is None else self._schemas[wire.name(self.down.ask)]
        found = {client: wire.opened(uploads[client], client, self.down, schema) for client in sorted(uploads)}
        return {client: reply for client, reply in found.items() if reply is not None}

    def feed(self, replies: Mapping[int, Tree]) -> Down:
        """Goes on with the replies of all clients that were asked, or of some. Returns the next message."""
        ask = self._ask
        if ask is None:
            return self.down
        if not replies:
            raise UserError(f"round {self._round}: no silo is left to average")
        clients = tuple(sorted(replies))
        reply = Reply(clients, **stack([replies[client] for client in clients]))
        self.loop.recorder.exchange(ask, reply, self._round)
        self.down = self._next(reply)
        return self.down

    def _next(self, reply: Reply | None) -> Down:
        self._exchange += reply is not None
        counted = () if reply is None else reply.clients
        try:
            with torch.no_grad():
                ask = next(self._asks) if reply is None else self._asks.send(reply)
        except StopIteration:
            ask = None
        if ask is not None and wire.name(ask) not in self._schemas:
            self._schemas[wire.name(ask)] = row(Silo.parts(self._probe.reply(ask, 0, self._round)), 0)
        self._ask = ask
        return wire.down(self._exchange, self._round, ask, self.terms.fingerprint, counted)

    def _rounds(self) -> Generator[Ask, Reply, None]:
        loop = self.loop
        yield from loop.begin()
        while loop.done < loop.schedule.rounds:
            self._round = loop.done + 1
            found = yield from loop.round()  # its `seconds` include the wait for the silos
            if self.on_round is not None:
                self.on_round(found)
        self.outcome = loop.outcome
