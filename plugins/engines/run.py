"""The one run loop: rounds, cohorts, recording, evaluation. It asks; an engine or FedML's silos answer.

begin ─► round 1 ─► ... ─► round T ─► finish, at the end of round T
         │ cohort ─► Algorithm.round ─► settle ─► evaluate ─► a row of rounds.csv
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from plugins.core.algorithm import Algorithm, Round, State
from plugins.core.component import Ask, Reply, Server
from plugins.core.data import Samples
from plugins.core.task import Task
from plugins.core.trees import Params
from plugins.data.streams import key, stream
from plugins.engines.record import Recorder

Row = dict[str, float]  # of rounds.csv
Asking = Generator[Ask, Reply, Row]


@dataclass(frozen=True)
class Schedule:
    """How many rounds with how many clients, and when the model is evaluated."""

    rounds: int
    cohort: int  # M, clients per round
    seed: int
    evaluate_every: int = 1  # rounds; the last one always


class Outcome(NamedTuple):
    """The result of a run."""

    params: Params  # the sent model
    evaluated: Params  # the evaluated one; the same object unless a method says otherwise
    buffers: Params
    rows: list[Row]
    tensors: Params  # "<component>/<quantity>", [T, ...]: what else was recorded, on the CPU


def cohort_size(participation: float, n_clients: int) -> int:
    """M = max(1, round(C N)), clients per round."""
    return max(1, round(participation * n_clients))


def draw_cohort(seed: int, round_: int, n_clients: int, size: int) -> tuple[int, ...]:
    """`size` clients, uniformly without replacement, ascending; the same for every recipe."""
    if size == n_clients:
        return tuple(range(n_clients))
    chosen = stream(seed, "cohort", round_).choice(n_clients, size, replace=False)
    return tuple(sorted(chosen.tolist()))


class Run:
    """One recipe with one seed, between rounds."""

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
    ) -> None:
        """`like`: samples, for their shape and device.

        `settle` changes the model at the end of a round, before it is evaluated and sent (privacy, defences).
        """
        self.algorithm, self.task, self.schedule = algorithm, task, schedule
        self.recorder, self.settle = recorder, settle
        self.everybody = tuple(range(n_clients))
        self._public, self._shape, self._device = public, tuple(like.shape[1:]), like.device
        self._w0 = params, buffers
        self.state = algorithm.init(self._server(0, self.everybody))
        self.evaluated: Params | None = None  # None: the model that is sent
        self.done = 0  # rounds

    @property
    def outcome(self) -> Outcome:
        """The result of the rounds so far."""
        sent = self.task.whole(self.state.params)
        evaluated = sent if self.evaluated is None else self.task.whole(self.evaluated)
        return Outcome(sent, evaluated, self.state.buffers, self.recorder.rows, self.recorder.tensors)

    def begin(self) -> Generator[Ask, Reply, None]:
        """Exchanges before the first round."""
        self.state = yield from self.algorithm.begin(self.state, self._server(0, self.everybody))

    def round(self) -> Asking:
        """The next round; returns its row."""
        t, schedule = self.done + 1, self.schedule
        self.recorder.begin(self.state)
        cohort = draw_cohort(schedule.seed, t, len(self.everybody), schedule.cohort)
        done: Round = yield from self.algorithm.round(self.state, self._server(t, cohort))
        last = t == schedule.rounds
        if last and self.algorithm.exchanges.finish:
            # No model is sent for training any more, so `finish` works on the evaluated one.
            state = done.state if done.evaluated is None else done.state._replace(params=done.evaluated)
            done = done._replace(state=(yield from self.algorithm.finish(state, self._server(t, self.everybody))))
            done = done._replace(evaluated=None)
        sent = self.settle(done.state.params)
        evaluated = None if done.evaluated is None else self.settle(done.evaluated)
        done = done._replace(state=done.state._replace(params=sent), evaluated=evaluated)
        self.state, self.evaluated, self.done = done.state, done.evaluated, t
        return self.recorder.end(t, done, last or t % schedule.evaluate_every == 0)

    def resume(self, done: int, state: State, evaluated: Params | None) -> None:
        """Goes on behind round `done`."""
        self.done, self.state, self.evaluated = done, state, evaluated

    def _server(self, t: int, cohort: tuple[int, ...]) -> Server:
        """The server at the beginning of round `t`; 0 is before the first."""
        keys = torch.tensor(key(self.schedule.seed, "server", t), device=self._device)
        public = Server.public if self._public is None else self._public
        return Server(self.task, *self._w0, t, len(self.everybody), self._shape, public, cohort=cohort, keys=keys)
