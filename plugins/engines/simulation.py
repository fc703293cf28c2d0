"""A whole federated run on one machine: the run loop, an engine that answers, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from fedml_noniid.plugins import recipes
from fedml_noniid.plugins.core.algorithm import Algorithm
from fedml_noniid.plugins.core.component import Ask, Public, Reply, Setting
from fedml_noniid.plugins.core.data import Samples
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.core.options import RecipeError
from fedml_noniid.plugins.core.task import Task
from fedml_noniid.plugins.core.trees import Params, Tree, tree_map
from fedml_noniid.plugins.data.checks import known
from fedml_noniid.plugins.data.drift import Drift
from fedml_noniid.plugins.data.streams import torch_stream
from fedml_noniid.plugins.data.types import Ints
from fedml_noniid.plugins.engines.absences import Absent, nobody
from fedml_noniid.plugins.engines.checkpoint import Checkpoints
from fedml_noniid.plugins.engines.clients import Clients, Engine, LocalTraining
from fedml_noniid.plugins.engines.own import OWN, split
from fedml_noniid.plugins.engines.own_tests import answered
from fedml_noniid.plugins.engines.record import Recorder
from fedml_noniid.plugins.engines.run import Outcome, Row, Run, Schedule
from fedml_noniid.plugins.engines.sequential import Sequential, plain
from fedml_noniid.plugins.engines.trial import Trial
from fedml_noniid.plugins.engines.vectorized import Vectorized, chunks
from fedml_noniid.plugins.engines.workers import Workers
from fedml_noniid.plugins.models.forward import Model

ENGINES = ("auto", "sequential", "vectorized")
DEVICES = ("auto", "cpu", "cuda")
ENOUGH = 2  # clients that move at a time on average; from here on, a dense model is faster side by side


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA if there is any. UserError for an unknown device, or for CUDA where there is none."""
    known("device", name, DEVICES)
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError("device 'cuda': this machine has no usable CUDA device; allowed here: auto, cpu")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def abreast(steps: Sequence[int], cohort: int) -> float:
    """How many clients of a cohort of `cohort` move at a time on average; `steps`: of every client."""
    drawn = cohort / len(steps)
    one_by_one = sum(steps) * drawn
    # A group that can run side by side takes the steps of its longest client, if any client of the group is drawn.
    together = [(max(steps[k] for k in group), 1 - (1 - drawn) ** len(group)) for group in chunks(steps, len(steps))]
    return one_by_one / max(sum(longest * chance for longest, chance in together), 1)


def choose_engine(name: str, network: Model, device: torch.device, together: float) -> tuple[str, str]:
    """(engine, why) for `auto | sequential | vectorized`. UserError for another name, or for what vmap can't take.

    `together`: how many clients move at a time on average if the cohort runs side by side. The choice goes by counts
    and not by the clock, because it decides about the last bits of a run.
    """
    known("engine", name, ENGINES)
    if name == "vectorized" and not network.vmappable:
        raise UserError(f"engine 'vectorized': vmap can't take model {network.name!r}; allowed: auto, sequential")
    if name != "auto":
        return name, "as asked"
    if not network.vmappable:
        return "sequential", f"vmap can't take model {network.name!r}"
    if device.type == "cuda":
        return "vectorized", "a GPU is busy only with many clients at once"
    if not network.dense:
        return "sequential", "convolutions on a CPU: grouped ones, over clients, are slower than one client at a time"
    if together < ENOUGH:
        return "sequential", f"a dense model on a CPU, but side by side only {together:.1f} clients move at a time"
    return "vectorized", f"a dense model on a CPU: side by side {together:.0f} clients move at a time"


def initial_model(network: Model, seed: int, like: torch.Tensor) -> tuple[Params, Params]:
    """(w_0, buffers) of a seed, the same in every runtime; dtype and device of `like`."""
    params, buffers = network.init(torch_stream(seed, "init"))
    return tree_map(lambda p: p.to(like), params), tree_map(lambda b: b.to(like), buffers)


def start(
    algorithm: Algorithm, network: Model, local: LocalTraining, seed: int, like: torch.Tensor
) -> tuple[Task, Params, Params]:
    """(task, w_0, buffers) of an algorithm; parameters that are never trained belong to the task, not to w_0.

    RecipeError if no parameter is trained.
    """
    params, buffers = initial_model(network, seed, like)
    classifier = network.layers[-1].parameters if algorithm.needs.fixed_classifier else ()
    fixed = {name: params[name] for name in sorted({*classifier, *network.frozen})}
    trained, own = {name: leaf for name, leaf in params.items() if name not in fixed}, Tree()
    if algorithm.needs.own_norms:
        trained, buffers, own = split(trained, buffers)
    if not trained:
        raise RecipeError(
            f"{algorithm.name}: of train.model = {network.name!r} nothing would be left to train, as it has no layer "
            "before its classifier; use a model with a hidden layer, such as mlp"
        )
    configured = replace(cast("Any", network), precision=local.precision)
    return algorithm.prepared(Task(configured, local.build(), fixed, own)), trained, buffers


def with_shared(
    algorithm: Algorithm, train: Samples, clients: Sequence[Ints], public: Samples | None
) -> tuple[Samples, Sequence[Ints]]:
    """(samples, positions by client), with the public samples that the algorithm gives to every client.

    The public samples stay clean: they belong to the server, and they are the same for every client.
    """
    shared = 0 if public is None else round(algorithm.needs.shared * len(public.y))
    if public is None or not shared:
        return train, clients
    noise = train.noise
    if noise is not None:
        clean = noise.row.new_full((shared,), len(noise.std) - 1)
        noise = noise._replace(row=torch.cat([noise.row, clean]))
    joined = Samples(torch.cat([train.x, public.x[:shared]]), torch.cat([train.y, public.y[:shared]]), noise)
    added = np.arange(len(train.y), len(train.y) + shared)
    return joined, [np.concatenate([positions, added]) for positions in clients]


def drive(asks: Generator[Ask, Reply, Any], answer: Callable[[Ask], Reply]) -> Any:
    """Runs a generator of Asks to its end and returns what it returns."""
    try:
        ask = next(asks)
        while True:
            ask = asks.send(answer(ask))
    except StopIteration as stop:
        return stop.value


class Simulation:
    """One recipe on one partition with one seed."""

    def __init__(
        self,
        recipe: str,
        settings: recipes.Settings,
        network: Model,
        train: Samples,
        clients: Sequence[Ints],
        test: Samples,
        validation: Samples | None,
        public: Samples | None,
        local: LocalTraining,
        schedule: Schedule,
        engine: str = "auto",
        memory_mb: int = 2048,
        checkpoint: Path | None = None,
        checkpoint_every: int = 5,
        fingerprint: str = "",
        observing: bool = False,
        workers: int = 1,
        absent: Absent = nobody,
        drift: Drift | None = None,
        tests: Callable[[], Sequence[Samples]] | None = None,
    ) -> None:
        """Everything lies on the device of `train`. The run goes on from `checkpoint` if it exists. Raises UserError.

        `observing`: whether the clients' own quantities are recorded too, which may cost further passes over data.
        `workers`: how many processes the sequential engine may take on a CPU; the bits are the same.
        `absent`: which clients do not answer. They compute nothing, and their memory stays as it is. It does not count
        where the method pools the data, as there is no client then. `drift`: how the labels of the clients and of
        the tests change with the round. `tests`: each client's own test samples, as it sees them before any drift. They
        count where clients keep a part of the model to themselves; None: the whole test set for each of them.
        """
        n, n_public = len(clients), 0 if public is None else len(public.y)
        if not 1 <= schedule.cohort <= n:
            raise UserError(f"cohort of {schedule.cohort} clients: must be at least 1 and at most all {n} clients")
        setting = Setting(n, schedule.cohort, local.optimizer, local.lr, n_public, network.tokens)
        self.algorithm = recipes.build(recipe, settings, setting)
        if self.algorithm.needs.public is Public.TEST_SET:
            public = test
        holders = clients
        if self.algorithm.needs.pooled:
            clients, schedule, absent = [np.concatenate(list(clients))], replace(schedule, cohort=1), nobody
        train, clients = with_shared(self.algorithm, train, clients, public)
        per_round = [local.steps or local.epochs * math.ceil(len(own) / local.batch_size) for own in clients]
        together = abreast(per_round, schedule.cohort)
        self.engine_name, self.engine_reason = choose_engine(engine, network, train.x.device, together)
        task, params, buffers = start(self.algorithm, network, local, schedule.seed, train.x)
        mine = {} if not task.own else dict(enumerate(tests())) if tests is not None else dict.fromkeys(range(n), test)
        store = Clients(
            self.algorithm, task, local, schedule.seed, train, dict(enumerate(clients)), public, params, buffers,
            observing, None if drift is None else drift.held(holders, len(train.y)), mine,
        )  # fmt: skip
        processes = min(workers, schedule.cohort) if train.x.device.type == "cpu" else 1
        self.engine: Engine
        if self.engine_name == "vectorized":
            self.engine = Vectorized(store, memory_mb, schedule.rounds * max(per_round))
        elif processes > 1:
            self.engine = Workers(store, processes, schedule.cohort)
        else:
            self.engine = Sequential(store)
        recorder = Recorder(task, test, validation, observing, drift)
        n = len(clients)  # one where the method pools the data
        self.loop = Run(
            self.algorithm, plain(task), params, buffers, n, schedule, recorder, public, train.x, absent=absent
        )
        self.checkpoint_every = checkpoint_every
        self.checkpoints: Checkpoints | None = None
        if checkpoint is not None:
            self.checkpoints = Checkpoints(checkpoint, self.algorithm.name, fingerprint)
        if self.checkpoints is not None and self.checkpoints.exists():
            found = self.checkpoints.read(self.loop.trees(store.memory))
            store.memory = found.trees["memory"]
            self.loop.restore(found)
        self.start_round = self.loop.done

    def run(self) -> Outcome:
        """Runs the rounds that are left. Raises NonFiniteError."""
        for _ in self.rounds():
            pass
        return self.outcome

    def rounds(self) -> Iterator[Mapping[str, float]]:
        """Runs the next round each time that a row is taken. Raises NonFiniteError."""
        loop, trial = self.loop, Trial(self.engine.clients)

        def answer(ask: Ask, round_: int) -> Reply:
            trial(ask, round_)
            return answered(self.engine, ask, round_)

        if loop.done == 0:
            drive(loop.begin(), partial(answer, round_=0))
        while loop.done < loop.schedule.rounds:
            yield drive(loop.round(), partial(answer, round_=loop.done + 1))
            due = loop.done % self.checkpoint_every == 0 or loop.done == loop.schedule.rounds
            if self.checkpoints is not None and due:
                self.checkpoints.write(loop.checkpoint(self.engine.clients.memory))

    @property
    def outcome(self) -> Outcome:
        """The result of the rounds so far."""
        return self.loop.outcome._replace(own=self.engine.clients.memory.get(OWN, {}))

    @property
    def remarks(self) -> dict[str, str]:
        """Facts that a reader of the accuracies must know, by kind: "own_models", "no_effect"."""
        if not self.algorithm.needs.own_norms:
            return {}
        if self.loop.task.own:
            return {
                "own_models": "accuracies are those of the clients' own models, each on its own test samples as the "
                "client sees them; with noise or rotation, compare with others by the noisy test"
            }
        return {"no_effect": f"{self.loop.task.network.name} has no batch norms that a client could keep to itself"}

    @property
    def rows(self) -> list[Row]:
        """The rows of rounds.csv so far."""
        return self.loop.recorder.rows
