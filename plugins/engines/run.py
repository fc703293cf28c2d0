"""The one run loop: rounds, cohorts, recording, evaluation. It asks; an engine or FedML's silos answer.

begin ─► round 1 ─► ... ─► round T ─► finish, at the end of round T
         │ cohort ─► Algorithm.round ─► settle ─► evaluate ─► a row of rounds.csv
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from fedml_noniid.plugins.core.algorithm import Algorithm, Round, State
from fedml_noniid.plugins.core.component import Ask, Reply, Server
from fedml_noniid.plugins.core.data import Samples
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.core.task import Task
from fedml_noniid.plugins.core.trees import Params, Tree, row
from fedml_noniid.plugins.data.streams import key, stream
from fedml_noniid.plugins.engines import own_tests
from fedml_noniid.plugins.engines.absences import Absent, nobody
from fedml_noniid.plugins.engines.arena import apart
from fedml_noniid.plugins.engines.checkpoint import Checkpoint
from fedml_noniid.plugins.engines.clients import numbers
from fedml_noniid.plugins.engines.record import Recorder

T = TypeVar("T")
Row = dict[str, float]  # of rounds.csv
Asking = Generator[Ask, Reply, Row]


@dataclass(frozen=True)
class Schedule:
    """How many rounds with how many clients, and when the model is evaluated."""

    rounds: int
    cohort: int  # M, clients per round
    seed: int
    evaluate_every: int = 1  # rounds; the last one always

    @property
    def evaluations(self) -> int:
        """Rounds after which the model is evaluated."""
        return math.ceil(self.rounds / self.evaluate_every)


class Outcome(NamedTuple):
    """The result of a run. Where clients keep a part to themselves, the models have that of w_0."""

    params: Params  # the sent model
    evaluated: Params  # the evaluated one; the same object unless a method says otherwise
    buffers: Params
    rows: list[Row]
    tensors: Params  # "<component>/<quantity>", [T, ...]: what else was recorded, on the CPU
    own: Tree = {}  # noqa: RUF012, never changed in place. The clients' own parts, leaves [N, ...], in simulations


def draw_cohort(seed: int, round_: int, n_clients: int, size: int) -> tuple[int, ...]:
    """`size` clients, uniformly without replacement, ascending; the same for every recipe."""
    if size == n_clients:
        return tuple(range(n_clients))
    chosen = stream(seed, "cohort", round_).choice(n_clients, size, replace=False)
    return tuple(sorted(chosen.tolist()))


class Run:
    """One recipe with one seed, between rounds.

    A client may be missing: an exchange ends without its answer. It then misses the rest of the round too.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        task: Task,
        params: Params,
        buffers: Params,
        n_clients: int,
        schedule: Schedule,
        recorder: Recorder,
        public: Samples | None,
        like: torch.Tensor,
        settle: Callable[[Params], Params] = lambda params: params,
        absent: Absent = nobody,
    ) -> None:
        """`like`: samples, for their shape and device.

        `settle` changes the model at the end of a round, before it is evaluated and sent (privacy, defences).
        `absent`: which clients will not answer. `missing` may also grow while an Ask is out.
        """
        self.algorithm, self.task, self.schedule = algorithm, task, schedule
        self.recorder, self.settle, self.absent = recorder, settle, absent
        self.everybody = tuple(range(n_clients))
        self._public, self._shape, self._device = public, tuple(like.shape[1:]), like.device
        self._w0 = params, buffers
        self.state = algorithm.init(self._server(0, self.everybody))
        self.evaluated: Params | None = None  # None: the model that is sent
        self.done = 0  # rounds
        self.exchange = 0  # of the round, from 0
        self.missing: set[int] = set()  # clients, for the rest of the round

    @property
    def outcome(self) -> Outcome:
        """The result of the rounds so far."""
        sent, buffers = self.task.model(self.state.params, self.state.buffers)
        evaluated = sent if self.evaluated is None else self.task.whole(self.evaluated)
        return Outcome(sent, evaluated, buffers, self.recorder.rows, self.recorder.tensors)

    def begin(self) -> Generator[Ask, Reply, None]:
        """Exchanges before the first round."""
        self.exchange, self.missing = 0, set()
        self.state = yield from self._exchanged(self.algorithm.begin(self.state, self._server(0, self.everybody)), 0)

    def round(self) -> Asking:
        """The next round; returns its row."""
        t, schedule = self.done + 1, self.schedule
        self.exchange, self.missing = 0, set()
        self.recorder.begin(self.state)
        cohort = draw_cohort(schedule.seed, t, len(self.everybody), schedule.cohort)
        done: Round = yield from self._exchanged(self.algorithm.round(self.state, self._server(t, cohort)), t)
        done = _kept(done)
        last = t == schedule.rounds
        if last and self.algorithm.exchanges.finish:
            # No model is sent for training any more, so `finish` works on the evaluated one.
            state = done.state if done.evaluated is None else done.state._replace(params=done.evaluated)
            finished = yield from self._exchanged(self.algorithm.finish(state, self._server(t, self.everybody)), t)
            done = done._replace(state=finished, evaluated=None)
        sent = self.settle(done.state.params)
        evaluated = None if done.evaluated is None else self.settle(done.evaluated)
        done = done._replace(state=done.state._replace(params=sent), evaluated=evaluated)
        self.state, self.evaluated, self.done = done.state, done.evaluated, t
        due = last or t % schedule.evaluate_every == 0
        own: Reply | None = None
        if due and self.task.own:
            own = yield from self._exchanged(own_tests.asking(self.everybody, sent, done.state.buffers, evaluated), t)
        return self.recorder.end(t, done, due, own)

    def checkpoint(self, memory: Tree, notes: dict[str, Any] | None = None) -> Checkpoint:
        """The run between two rounds. `memory`: of the clients, where they are; `notes`: as JSON, for a runtime."""
        recorder = self.recorder
        meter, differs = recorder.meter.state(self.state.params), self.evaluated is not None
        trees = self.trees(memory)
        return Checkpoint(self.done, trees, meter, recorder.rows, recorder.recorded, differs, notes or {})

    def restore(self, found: Checkpoint) -> None:
        """Goes on behind the last round of a checkpoint."""
        self.done, self.state = found.round, State(**found.trees["server"])
        self.evaluated = found.trees["evaluated"] if found.differs else None
        self.recorder.rows, self.recorder.recorded = found.rows, found.recorded
        self.recorder.meter.restore(self.state.params, found.meter)

    def trees(self, memory: Tree) -> Tree:
        """The trees of a checkpoint; before the first round, their structure."""
        return {
            "server": self.state._asdict(),
            "memory": memory,
            # The sent model stands in where it is the evaluated one.
            "evaluated": self.state.params if self.evaluated is None else self.evaluated,
        }

    def _exchanged(self, asks: Generator[Ask, Reply, T], t: int) -> Generator[Ask, Reply, T]:
        """Passes Asks of round `t` on to the clients that are left, and records each exchange."""
        try:
            ask = next(asks)
            while True:
                self.missing.update(self.absent(t, self.exchange, ask.to))
                reply = yield self._addressed(ask, t)
                # Addressed again: while the Ask was out, `missing` may have grown.
                if not own_tests.is_test(ask):
                    self.recorder.exchange(self._addressed(ask, t), reply, t)
                self.exchange += 1
                ask = asks.send(reply)
        except StopIteration as stop:
            found: T = stop.value
            return found

    def _addressed(self, ask: Ask, t: int) -> Ask:
        """The Ask without the missing clients; the same object if it asks none of them. UserError if nobody is left."""
        left = [position for position, client in enumerate(ask.to) if client not in self.missing]
        if len(left) == len(ask.to):
            return ask
        if not left:
            asked = ", ".join(map(str, ask.to))
            raise UserError(
                f"round {t}, job {ask.job!r}: every client that is asked ({asked}) is missing; "
                "at least one has to answer"
            )
        return ask._replace(
            to=tuple(ask.to[position] for position in left), each=row(ask.each, numbers(left, self._device))
        )

    def _server(self, t: int, cohort: tuple[int, ...]) -> Server:
        """The server at the beginning of round `t`; 0 is before the first."""
        keys = torch.tensor(key(self.schedule.seed, "server", t), device=self._device)
        public = Server.public if self._public is None else self._public
        return Server(self.task, *self._w0, t, len(self.everybody), self._shape, public, cohort=cohort, keys=keys)


def _kept(done: Round) -> Round:
    """The round without leaves in the memory of the clients' updates, which the next round overwrites."""
    trees = {"state": done.state._asdict(), "evaluated": done.evaluated or {}, "metrics": done.metrics}
    found = apart(trees, done.trained)
    return Round(State(**found["state"]), found["evaluated"] or None, found["metrics"], done.trained)
