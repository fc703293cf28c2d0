"""Runs a simulation on a virtual clock: makes its schedule, and records the clock of each round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from fedml_noniid.core.algorithm import Algorithm
from fedml_noniid.core.component import overrides
from fedml_noniid.core.errors import UserError
from fedml_noniid.data.ragged import lists_of
from fedml_noniid.engines import schedule as schedules
from fedml_noniid.engines.callbacks import Callback, Columns, RoundEnd, Stateless
from fedml_noniid.engines.callbacks import Exchange as Exchanged
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import Plan
from fedml_noniid.engines.schedule import SECOND, Exchange, Schedule, Waits, Work
from fedml_noniid.engines.simulation import ENGINES, Simulation
from fedml_noniid.engines.traffic import Meter

Message = tuple[str, int, int]  # the component that asks, or ""; bytes down; bytes up


class Clock(Callback):
    """Records `clock_s`, the end of the round, `wasted_s`, the clients' seconds that did not count,
    and `staleness`, the mean number of steps by which the sent models were old."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def measure(self, end: RoundEnd) -> Columns:
        step = self.schedule.plan[end.number - 1]
        return {
            "clock_s": step.ends / SECOND,
            "wasted_s": step.wasted / SECOND,
            "staleness": fmean(self.schedule.staleness(end.number)),
        }

    def state(self) -> dict[str, Any]:
        return {"schedule_sha256": self.schedule.sha256}

    def restore(self, state: dict[str, Any]) -> None:
        if state != self.state():
            raise UserError(
                "the checkpoint has another schedule of clients",
                allowed="the machine that began the run, or a file of devices",
            )


class ClockOfChosen(Callback):
    """Records the same where a method chooses the clients: an exchange takes as long as its slowest
    client, so no work is wasted."""

    def __init__(self, work: Work) -> None:
        self.work, self.round, self.asked = work, 0, 0  # exchanges of the round beside training
        self.now = work.waits(work.before, range(len(work.steps))) if work.before else 0

    def on_exchange(self, exchange: Exchanged) -> None:
        is_training = not exchange.ask.owner
        self.asked = (self.asked if exchange.round == self.round else 0) + (not is_training)
        self.round = exchange.round
        number = 0 if is_training else self.asked
        if exchange.round and number < len(self.work.exchanges):  # the others end the run
            steps = {k: self.work.steps[k] * is_training for k in exchange.ask.to}
            self.now += max(
                self.work.takes(k, self.work.exchanges[number], steps[k]) for k in steps
            )

    def measure(self, end: RoundEnd) -> Columns:
        return {"clock_s": self.now / SECOND, "wasted_s": 0.0, "staleness": 0.0}

    def state(self) -> dict[str, Any]:
        return {"clock_us": self.now}

    def restore(self, state: dict[str, Any]) -> None:
        self.now = state["clock_us"]


class _Messages(Stateless):
    """Counts the bytes of each exchange of one client."""

    def __init__(self, algorithm: Algorithm) -> None:
        self.by_round: list[list[Message]] = [[], []]
        self._algorithm, self._meter = algorithm, Meter()

    def on_exchange(self, exchange: Exchanged) -> None:
        ask = exchange.ask
        self._meter.count(ask, exchange.reply, self._algorithm.packing(ask.job))
        up, down = (sum(counts.values()) for counts in self._meter.read())
        self._meter.forget()
        self.by_round[exchange.round].append((exchange.ask.owner, down, up))


def scheduled(algorithm: Algorithm, federation: Federation, plan: Plan) -> tuple[Plan, Federation]:
    """The plan with the schedule of its clock, and the federation without the late clients; for a
    method that chooses clients, the plan with their work, and the same federation.

    The bytes are those of a round with one client and one batch, which is run for them and
    forgotten. UserError for a schedule that can't be.
    """
    assert plan.clock is not None, "the caller asks"
    devices, waits, until = plan.clock
    if algorithm.needs.pooled:
        if until:
            raise UserError(f"until_s is refused: {algorithm.name} has no clients, so no clock")
        return plan, federation
    if waits.buffer and not algorithm.needs.stale:
        raise UserError(
            f"{algorithm.name} takes no answers of models of earlier rounds, which a buffer has",
            allowed="recipes with fedbuff or fedasync",
        )
    chooser, is_plain = algorithm.chooser, devices == replace(devices, dropout=0.0, windows=())
    if chooser is not None and (until or waits != Waits() or not is_plain):
        raise UserError(
            f"{chooser.name!r} chooses the clients of a round in training, so nobody knows before "
            "it who is late, or how many rounds there are",
            allowed="devices without dropout, on_s and every_s; no waits and no until_s",
        )
    sizes = lists_of(federation.used_by(algorithm).clients).sizes
    whole = 0 * sizes if algorithm.needs.no_training else plan.steps(sizes)
    one_pass = plan.local.model_copy(update={"local_steps": 0, "epochs": 1})
    passes = replace(plan, local=one_pass).steps(sizes)
    messages = _messages(algorithm, federation, plan)
    before, exchanges = (
        # Training comes first, also where a component asks before it.
        tuple(_costs(algorithm, sorted(sent, key=lambda message: message[0] != "")))
        for sent in messages
    )
    work = Work(
        devices, plan.seed, tuple(whole.tolist()), tuple(passes.tolist()), exchanges, before
    )
    if chooser is not None:
        return replace(plan, work=work), federation
    schedule = schedules.schedule(work, waits, plan.cohort, plan.rounds, until)
    plan = replace(plan, rounds=len(schedule.plan), schedule=schedule)
    return plan, replace(federation, absent=schedule.absent)


def _messages(algorithm: Algorithm, federation: Federation, plan: Plan) -> list[list[Message]]:
    """(owner, bytes down, bytes up) of each exchange of a client before round 1, and in a round."""
    client = plan.draw_cohort(1, federation.size)[0]
    few = {k: indices[:1] for k, indices in federation.clients.items()}
    small = replace(
        federation,
        clients={**few, client: federation.clients[client][: plan.local.batch_size]},
        absent=lambda round_, exchange, asked: [k for k in asked if k != client],
    )
    # A second round would follow, so nothing is evaluated or finished.
    plan = replace(plan, rounds=2, evaluate_every=2, workers=1, observing=False, engine=ENGINES[1])
    messages = _Messages(algorithm)
    next(Simulation(algorithm, small, plan, [messages]).rounds())
    return messages.by_round


def _costs(algorithm: Algorithm, sent: Sequence[Message]) -> Iterator[Exchange]:
    """With the passes over the own samples: one in each exchange of a method that takes such
    passes in its answers, one in training of a method that takes them there."""
    reading = [c for c in algorithm.components if c.needs.local_set]
    answering = {c.name for c in reading if overrides(c, "answer")}
    for owner, down, up in sent:
        reads = owner in answering if owner else len(answering) < len(reading)
        yield Exchange(down, up, int(reads))
