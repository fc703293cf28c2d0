"""Loops over rounds, cohorts and callbacks. It asks; an engine or FedML's silos answer.

begin ─► round 1 ─► ... ─► round T ─► finish, at the end of round T
         │ cohort ─► Algorithm.round ─► postprocess ─► evaluate ─► a row of rounds.csv ─► callbacks

A callback may make an earlier round the last one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from fedml_noniid.core.algorithm import TRAIN, RoundResult, State
from fedml_noniid.core.component import Ask, Reply, Server
from fedml_noniid.core.errors import NonFiniteError, UserError
from fedml_noniid.core.trees import Params, Tree, row, tree_map
from fedml_noniid.data.streams import key
from fedml_noniid.engines import client_state_file, client_tests
from fedml_noniid.engines.accounting import Accounting
from fedml_noniid.engines.callbacks import (
    Callback,
    CurrentRun,
    Exchange,
    RoundEnd,
    Row,
    Stateless,
    call_hook,
    columns_of,
)
from fedml_noniid.engines.checkpoint import Checkpoint, Checkpoints
from fedml_noniid.engines.clients import Clients, numbers, refuse_non_finite
from fedml_noniid.engines.evaluation import check_measured
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import Start
from fedml_noniid.engines.record import Evaluation, Recording, split_row, stacked
from fedml_noniid.engines.sequential import plain
from fedml_noniid.engines.storage import unaliased

T = TypeVar("T")
Asking = Generator[Ask, Reply, Row]


class Outcome(NamedTuple):
    """Holds the result of a run.

    Where clients keep a part to themselves, the models have that of w_0.
    """

    params: Params  # the sent model
    evaluated: Params  # the evaluated one; the same object unless a method says otherwise
    buffers: Params
    rows: list[Row]
    tensors: Params  # "<component>/<quantity>", [T, ...]: what else was recorded, on the CPU
    # In simulations: what stays on each client, leaves [N, ...].
    personal: Tree = {}  # noqa: RUF012, never changed in place
    models: Tree = {}  # noqa: RUF012  # `component.MODELS` and MODEL_OF, if clients have these


class Run:
    """Runs one recipe with one seed, round by round.

    A client may be missing: an exchange ends without its answer. It then misses the rest of the
    round too.
    """

    def __init__(
        self,
        start: Start,
        federation: Federation,
        callbacks: Sequence[Callback] = (),
        postprocess: Callable[[Params], Params] = lambda params: params,
        clients: Clients | None = None,
        limit: float = math.inf,
    ) -> None:
        """`federation`: as the algorithm uses it, see `Federation.used_by`.

        `callbacks`: of this run alone.

        `postprocess` changes the model at the end of a round, before it is evaluated and sent
        (privacy, defences). `clients`: where their memory is, in a simulation. `limit`: see
        `record.Evaluation`.
        """
        self.start, self.federation, self.postprocess, self.clients = (
            start,
            federation,
            postprocess,
            clients,
        )
        validation = None if federation.validation is None else federation.validation.y
        vocabulary = start.plan.network.vocabulary
        check_measured(start.task.loss, vocabulary, test=federation.test.y, validation=validation)
        self.algorithm, self.plan = start.algorithm, start.plan
        self.everybody = tuple(range(federation.size))
        observing = self.plan.observing
        made = [Evaluation(federation, observing, limit), Recording(observing)]
        if mechanisms := start.algorithm.mechanisms:
            made.append(Accounting(mechanisms))
        self.callbacks: list[Callback] = [*made, *callbacks]
        self.notes: dict[str, Any] = {}  # what a runtime adds to a checkpoint, as JSON
        self.state = self.algorithm.init(self._server(0, self.everybody))
        self.evaluated: Params | None = None  # None: the model that is sent
        self.rows: list[Row] = []
        self.recorded: list[Params] = []  # of each row: "<component>/<quantity>", on the CPU
        self.done = 0  # rounds
        self.stopped = ""  # why a callback has ended the run; "" if none has
        self.exchange = 0  # of the round, from 0
        self.missing: set[int] = (
            set()
        )  # clients, for the rest of the round. It may grow while an Ask is out
        self._trained: Reply | None = None  # the replies to local training in this round
        for callback in self.callbacks:
            call_hook(callback, "on_start", self)

    @property
    def over(self) -> bool:
        """Whether the last round is done."""
        return bool(self.stopped) or self.done == self.plan.rounds

    @property
    def outcome(self) -> Outcome:
        """The result of the rounds so far."""
        task = self.start.task
        sent, buffers = task.model(self.state.params, self.state.buffers)
        evaluated = sent if self.evaluated is None else task.whole(self.evaluated)
        models = self.algorithm.models(self.state.slices)
        recorded = stacked(self.recorded)
        return Outcome(sent, evaluated, buffers, self.rows, recorded, models=models)

    def begin(self) -> Generator[Ask, Reply, None]:
        """Exchanges before the first round."""
        self.exchange, self.missing, self._trained = 0, set(), None
        self.state = yield from self._exchanged(
            self.algorithm.begin(self.state, self._server(0, self.everybody)), 0
        )

    def round(self) -> Asking:
        """The next round; returns its row."""
        t, before, began = self.done + 1, self.state, time.perf_counter()
        self.exchange, self.missing, self._trained = 0, set(), None
        cohort = self.plan.draw_cohort(t, len(self.everybody))
        done: RoundResult = yield from self._exchanged(
            self.algorithm.round(before, self._server(t, cohort)), t
        )
        done_round, last = _without_scratch(done), t == self.plan.rounds
        row, recorded, done = yield from self._ended(before, done_round, t, last)
        if not last:
            rows = [*self.rows, row]
            self.stopped = next(
                (why for callback in self.callbacks if (why := call_hook(callback, "stop", rows))),
                "",
            )
            untested = t % self.plan.evaluate_every
            if self.stopped and (untested or self.algorithm.exchanges.finish):
                row, recorded, done = yield from self._ended(before, done_round, t, True)
        row["seconds"] = time.perf_counter() - began
        self.state, self.evaluated, self.done = done.state, done.evaluated, t
        self.rows.append(row)
        self.recorded.append(recorded)
        for callback in self.callbacks:
            call_hook(callback, "on_round", self, row)
        return row

    def checkpoint(self) -> Checkpoint:
        """The run between two rounds."""
        return Checkpoint(
            self.done,
            self.trees,
            self.stopped,
            self.kept(),
            self.rows,
            self.recorded,
            self.evaluated is not None,
            self.notes,
        )

    def kept(self) -> list[dict[str, Any]]:
        """The states of the callbacks. UserError for one that is not JSON."""
        return [call_hook(callback, "state") for callback in self.callbacks]

    def restore(self, checkpoint: Checkpoint) -> None:
        """Goes on behind the last round of a checkpoint."""
        self.done, self.state, self.stopped = (
            checkpoint.round,
            State(**checkpoint.trees["server"]),
            checkpoint.stopped,
        )
        self.evaluated = checkpoint.trees["evaluated"] if checkpoint.differs else None
        self.rows, self.recorded, self.notes = (
            checkpoint.rows,
            checkpoint.recorded,
            checkpoint.notes,
        )
        if self.clients is not None:
            memory, trees = self.clients.memory, checkpoint.trees
            if "on_disk" in trees:
                memory.resume(trees["on_disk"])
            else:
                memory.restore(trees["memory"])
        for callback, state in zip(self.callbacks, checkpoint.callbacks, strict=True):
            call_hook(callback, "restore", state)

    @property
    def trees(self) -> Tree:
        """The trees of a checkpoint."""
        memory: Tree = {"memory": {}} if self.clients is None else self.clients.memory.state()
        return memory | {
            "server": self.state._asdict(),
            "evaluated": self.evaluated or {},
        }

    @property
    def structure(self) -> Tree:
        """The structure of the trees, with an evaluated model, the memories in RAM and on disk."""
        whole: Tree = {}
        on_disk: Tree = {}
        if self.clients is not None:
            n = len(self.clients.row)
            whole = tree_map(lambda leaf: leaf.expand(n, *leaf.shape), self.clients.memory.first)
            on_disk = client_state_file.structure(n)
        return self.trees | {"evaluated": self.state.params, "memory": whole, "on_disk": on_disk}

    def _ended(
        self, before: State, done: RoundResult, t: int, last: bool
    ) -> Generator[Ask, Reply, tuple[Row, Params, RoundResult]]:
        """(row, what else is recorded, the round as it ends): the end of round `t`, which `last`
        says is the last."""
        if last and self.algorithm.exchanges.finish:
            # No model is sent for training any more, so `finish` works on the evaluated one.
            state = (
                done.state if done.evaluated is None else done.state._replace(params=done.evaluated)
            )
            finished = yield from self._exchanged(
                self.algorithm.finish(state, self._server(t, self.everybody)), t
            )
            done = done._replace(state=finished, evaluated=None)
        sent = self.postprocess(done.state.params)
        evaluated = None if done.evaluated is None else self.postprocess(done.evaluated)
        done = done._replace(state=done.state._replace(params=sent), evaluated=evaluated)
        task, due = self.start.task, last or t % self.plan.evaluate_every == 0
        tested: Reply | None = None
        if due and task.own_models:
            asks = client_tests.asking(self.algorithm, self.everybody, done.state, evaluated)
            tested = yield from self._exchanged(asks, t)
        assert self._trained is not None, "every round trains"
        end = RoundEnd(t, before, done, self._trained, task, due, tested)
        row, recorded = split_row(columns_of(self.callbacks, end))
        row = {"round": t} | row
        length, loss = row["update_norm_server"], row["test_loss"] if due else 0.0
        if tested is not None and not math.isfinite(loss):
            refuse_non_finite(tested, t)
            loss = 0.0  # no client has test samples
        if not math.isfinite(length + loss):
            raise NonFiniteError(
                f"round {t}, server: update or test loss is not finite; lower lr or the method's "
                "coefficients"
            )
        if self.rows and row.keys() ^ self.rows[0].keys() - {"seconds"}:
            changed = ", ".join(sorted(row.keys() ^ self.rows[0].keys() - {"seconds"}))
            raise UserError(
                f"round {t}: columns {changed} are not those of round 1; allowed: the same in "
                "each round"
            )
        row["update_norm_server_sum"] = length + (
            self.rows[-1]["update_norm_server_sum"] if self.rows else 0.0
        )
        return row, recorded, done

    def _exchanged(self, asks: Generator[Ask, Reply, T], t: int) -> Generator[Ask, Reply, T]:
        """Passes Asks of round `t` on to the clients that are left, and tells the callbacks of each
        exchange."""
        try:
            ask = next(asks)
            while True:
                self.missing.update(self.federation.absent(t, self.exchange, ask.to))
                reply = yield self._addressed(ask, t)
                if (attackers := self.federation.attackers) and not client_tests.is_test(ask):
                    trained = self.algorithm.components if ask.job == TRAIN else ()
                    reply = attackers.lied(reply, t, trained)
                # Addressed again: while the Ask was out, `missing` may have grown.
                if not client_tests.is_test(ask):
                    self._notify(self._addressed(ask, t), reply, t)
                self.exchange += 1
                ask = asks.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result

    def _notify(self, ask: Ask, reply: Reply, t: int) -> None:
        """Tells the callbacks of an exchange. Raises NonFiniteError, naming the client."""
        # A silo with privacy noise withholds its loss: NaN. It has checked it itself.
        deployed = self.algorithm.setting.deployed
        refuse_non_finite(replace(reply, loss=reply.loss.nan_to_num()) if deployed else reply, t)
        exchange = Exchange(t, ask, reply, self.state, self._trained, self.start.task)
        for callback in self.callbacks:
            call_hook(callback, "on_exchange", exchange)
        if ask.job == TRAIN:
            self._trained = reply

    def _addressed(self, ask: Ask, t: int) -> Ask:
        """The Ask without the missing clients; the same object if it asks none of them.

        UserError if nobody is left.
        """
        left = [position for position, client in enumerate(ask.to) if client not in self.missing]
        if len(left) == len(ask.to):
            return ask
        if not left:
            asked = ", ".join(map(str, ask.to))
            raise UserError(
                f"round {t}, job {ask.job!r}: every client that is asked ({asked}) is missing; "
                "at least one has to answer"
            )
        device = self.federation.test.x.device
        return ask._replace(
            to=tuple(ask.to[position] for position in left),
            each=row(ask.each, numbers(left, device)),
        )

    def _server(self, t: int, cohort: tuple[int, ...]) -> Server:
        """The server at the beginning of round `t`; 0 is before the first."""
        start, federation = self.start, self.federation
        keys = torch.tensor(key(self.plan.seed, "server", t), device=federation.test.x.device)
        public = Server.public if federation.public is None else federation.public
        shape = tuple(federation.test.x.shape[1:])
        task, w0 = plain(start.task_at(t)), (start.params, start.buffers)
        at = Server(task, *w0, t, federation.size, shape, public, cohort=cohort, keys=keys)
        schedule, work = self.plan.schedule, self.plan.work
        at = at if work is None else replace(at, durations=work.durations)
        return at if schedule is None else replace(at, staleness=schedule.staleness(t))


class Checkpointing(Stateless):
    """Writes the checkpoints of a run, which goes on from the last one if there is one."""

    def __init__(self, checkpoints: Checkpoints, every: int = 1) -> None:
        """`every`: rounds from one checkpoint to the next; there is one after the last round
        too."""
        self.checkpoints, self.every = checkpoints, every

    def on_start(self, run: CurrentRun) -> None:
        assert isinstance(run, Run), "no other keeps checkpoints"
        run.kept()  # now, not after hours
        self.checkpoints.set_recipe(run.algorithm.name)
        if run.clients is not None:
            path = self.checkpoints.path.with_suffix(".memory")
            run.clients.memory.keep_in(path, fresh=not self.checkpoints.exists())
        if self.checkpoints.exists():
            run.restore(self.checkpoints.read(run.structure))

    def on_round(self, run: CurrentRun, row: Row) -> None:
        assert isinstance(run, Run), "as above"
        if run.over or run.done % self.every == 0:
            self.checkpoints.write(run.checkpoint())
            if run.clients is not None:
                run.clients.memory.committed()


def _without_scratch(done: RoundResult) -> RoundResult:
    """The round without leaves in the memory of the clients' updates, which the next round
    overwrites."""
    trees = {
        "state": done.state._asdict(),
        "evaluated": done.evaluated or {},
        "metrics": done.metrics,
    }
    kept = unaliased(trees, done.trained)
    return done._replace(
        state=State(**kept["state"]),
        evaluated=kept["evaluated"] or None,
        metrics=kept["metrics"],
    )
