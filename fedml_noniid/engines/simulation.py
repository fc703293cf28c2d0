"""Simulates a whole federated run on one machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from fedml_noniid.core.algorithm import Algorithm
from fedml_noniid.core.component import NORMS
from fedml_noniid.core.errors import UserError, known
from fedml_noniid.data.ragged import lists_of
from fedml_noniid.data.types import Ints
from fedml_noniid.engines import streaming
from fedml_noniid.engines.absences import nobody
from fedml_noniid.engines.callbacks import Callback, Row
from fedml_noniid.engines.client_tests import answered, models_of_clients
from fedml_noniid.engines.clients import Clients, Engine
from fedml_noniid.engines.device import refusing
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.forks import autograd_survives_fork
from fedml_noniid.engines.plan import Plan, Start
from fedml_noniid.engines.run import Outcome, Run
from fedml_noniid.engines.sequential import Sequential
from fedml_noniid.engines.vectorized import Vectorized, chunks
from fedml_noniid.engines.workers import Workers
from fedml_noniid.models.model import Model

A = TypeVar("A")  # an ask
R = TypeVar("R")  # its reply
T = TypeVar("T")  # what the generator returns
LOG = logging.getLogger(__name__)
ENGINES = ("auto", "sequential", "vectorized")
# clients that move at a time on average; from here on, a dense model is faster side by side
MIN_PARALLEL_CLIENTS = 2


def mean_parallel_clients(steps: Ints, cohort: int) -> float:
    """How many clients of a cohort of `cohort` move at a time on average; `steps` [N]: of every
    client."""
    drawn = cohort / len(steps)
    one_by_one = int(steps.sum()) * drawn
    values, counts = np.unique(steps, return_counts=True)
    # A group that can run side by side takes the steps of its longest client, if any client of the
    # group is drawn.
    together = [
        (int(values[group].max()), 1 - (1 - drawn) ** int(counts[group].sum()))
        for group in chunks(values.tolist(), len(steps))
    ]
    return one_by_one / max(sum(longest * chance for longest, chance in together), 1)


# The engine that `auto` takes for a kind of network, on a CPU and on a GPU, and why.
# docs/performance.md has this table.
AUTO = {
    "dense": ("vectorized", "a dense model: side by side {moving:.0f} clients move at a time"),
    "dense, alone": (
        "sequential",
        "a dense model, but side by side only {moving:.1f} clients move at a time",
    ),
    "other": (
        "sequential",
        "convolutions or recurrent layers: one client at a time takes their fastest kernels",
    ),
    "without vmap": ("sequential", "vmap can't take {name!r}: {obstacle}"),
}


def choose_engine(name: str, network: Model, moving: float) -> tuple[str, str]:
    """(engine, why) for `auto | sequential | vectorized`.

    UserError for another name, or for what vmap can't take.

    `moving`: how many clients move at a time on average if the cohort runs side by side. The choice
    goes by counts and not by the clock, because it decides about the last bits of a run.
    """
    known("engine", name, ENGINES)
    obstacle = network.sequential_only
    if name == "vectorized" and not network.vmappable:
        raise UserError(
            f"engine 'vectorized': vmap can't take model {network.name!r}, as {obstacle}; allowed: "
            "auto, sequential"
        )
    if name != "auto":
        return name, "as asked"
    kind = "dense" if network.dense else "other" if network.vmappable else "without vmap"
    if kind == "dense" and moving < MIN_PARALLEL_CLIENTS:
        kind = "dense, alone"
    engine, why = AUTO[kind]
    return engine, why.format(moving=moving, name=network.name, obstacle=obstacle)


def drive(asks: Generator[A, R, T], answer: Callable[[A], R]) -> T:
    """Runs a generator of Asks to its end and returns what it returns."""
    try:
        ask = next(asks)
        while True:
            ask = asks.send(answer(ask))
    except StopIteration as stop:
        ended: T = stop.value
        return ended


class Simulation:
    """Simulates one algorithm on one federation with one seed, in this process."""

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        plan: Plan,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        """`algorithm`: composed for `plan.setting` of this federation. Raises UserError."""
        self.algorithm, self.attackers = algorithm, federation.attackers
        used = federation.used_by(algorithm)
        if algorithm.needs.pooled:
            plan = replace(plan, cohort=1)
        per_round = plan.steps(lists_of(used.clients).sizes)
        device = used.train.x.device
        moving = mean_parallel_clients(per_round, plan.cohort)
        self.engine_name, self.engine_reason = choose_engine(plan.engine, plan.network, moving)
        if not plan.network.vmappable:
            LOG.info("%s engine: %s", self.engine_name, self.engine_reason)
        start = Start.from_plan(algorithm, plan, used.train.x)
        store = Clients(start, used)
        processes = min(plan.workers, plan.cohort) if device.type == "cpu" else 1
        if self.engine_name == "sequential" and processes > 1 and not autograd_survives_fork():
            LOG.warning(
                "clients train in one process: autograd has threads, which no fork survives"
            )
            processes = 1
        attacked = used.attackers is not None and used.attackers.in_answers
        # A lie goes by the others' updates, so these are held.
        streams = "" if attacked else streaming.reason(start, callbacks)
        if streams and self.engine_name == "sequential":
            LOG.info("updates are added up one by one: %s", streams)
        # Another engine with the same bits may take its place before the first round.
        self.engine: Engine
        if self.engine_name == "vectorized":
            self.engine = Vectorized(store, plan.clients_at_once)
        elif processes > 1:
            self.engine = Workers(store, processes, plan.cohort, bool(streams))
        else:
            self.engine = Sequential(store, streams=bool(streams))
        self.loop = Run(start, used, callbacks, clients=store)
        self.start_round = self.loop.done

    def run(self) -> Outcome:
        """Runs the rounds that are left. Raises NonFiniteError."""
        for _ in self.rounds():
            pass
        return self.outcome

    def rounds(self) -> Iterator[Row]:
        """Runs the next round each time that a row is taken. Raises NonFiniteError."""
        loop = self.loop
        if loop.done == 0:
            with refusing(loop.plan.network):
                drive(loop.begin(), partial(answered, self.engine, round_=0))
        while not loop.over:
            with refusing(loop.plan.network):
                answer = partial(answered, self.engine, round_=loop.done + 1)
                row = drive(loop.round(), answer)
            yield row

    @property
    def outcome(self) -> Outcome:
        """The result of the rounds so far."""
        state, evaluated = self.loop.state, self.loop.evaluated
        model = state.params if evaluated is None else evaluated
        personal = models_of_clients(self.engine.clients, model, state.buffers)
        return self.loop.outcome._replace(personal=personal)

    @property
    def remarks(self) -> dict[str, str]:
        """Facts that a reader of the accuracies must know, by kind: "own_models", "no_effect",
        "privacy", "stopped", "one_by_one", "clock", "attack", "cohorts"."""
        lines = (
            {"stopped": f"after round {self.loop.done}: {self.loop.stopped}"}
            if self.loop.stopped
            else {}
        )
        schedule = self.loop.plan.schedule
        if schedule is not None and schedule.nobody_in_time:
            lines["clock"] = (
                f"in {schedule.nobody_in_time} of {len(schedule.plan)} rounds nobody would be in "
                "time, so the quickest client counted"
            )
        if one_by_one := self.loop.plan.network.sequential_only:
            lines["one_by_one"] = f"vmap can't take the network: {one_by_one}"
        if (attackers := self.attackers) is not None:
            needs = self.algorithm.needs
            idle = (needs.pooled or needs.no_training) and attackers.in_updates
            text = f"clients {', '.join(map(str, attackers.clients))} attack"
            lines["attack"] = text + idle * " without an effect, as no client sends what it trained"
        if mechanisms := self.algorithm.mechanisms:
            lines["privacy"] = "; ".join(
                f"per {mechanism.unit} at delta {mechanism.delta:g}" for mechanism in mechanisms
            )
        network, components = self.loop.plan.network, self.algorithm.components
        others = sorted(c.name for c in components if c.needs.personal != {NORMS})
        if len(others) < len(components) and not network.norms:
            lines["no_effect"] = (
                f"{network.name} has no batch norms that a client could keep to itself, so it "
                f"trains as {'+'.join(others) or 'fedavg'}"
            )
        if (chooser := self.algorithm.chooser) is not None:
            everybody = self.loop.plan.cohort == len(self.loop.everybody)
            lines["no_effect" if everybody else "cohorts"] = (
                f"all clients take part in each round, so {chooser.name} has none to choose"
                if everybody
                else f"{chooser.name} chooses the clients of each round, so pairs by seed have "
                "not the same clients, and their differences hold the chance of the cohorts too"
            )
        if self.loop.start.task.own_models:
            text = (
                "accuracies are those of the clients' own models, each on its own test samples "
                "as the client sees them; with noise or rotation, compare with others by the "
                "noisy test"
            )
            if self.loop.federation.absent is not nobody:
                text += "; a client that is missing in a round is not tested in it"
            if self.algorithm.models(self.loop.state.slices):
                text += "; a new client takes the model with the lowest loss on its samples"
            lines["own_models"] = text
        return lines
