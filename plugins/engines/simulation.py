"""A whole federated run in one process: rounds, cohorts, evaluation, traffic, checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from plugins import recipes
from plugins.core.algorithm import Algorithm
from plugins.core.component import Ask, Asks, Desk, RecipeError, Reply, Round, Samples, Server, Setting
from plugins.core.errors import UserError, nearest
from plugins.core.task import Network, Task
from plugins.core.trees import Params, Tree, tree_map
from plugins.data.randomness import key, stream, torch_stream
from plugins.data.types import Ints
from plugins.engines import checkpoint as checkpoints
from plugins.engines.clients import Clients, Engine, LocalTraining
from plugins.engines.record import Recorder
from plugins.engines.sequential import Sequential
from plugins.engines.vectorized import Vectorized, chunks
from plugins.engines.workers import Workers

ENGINES = ("auto", "sequential", "vectorized")
DEVICES = ("auto", "cpu", "cuda")
ENOUGH = 2  # clients side by side on average, from which on a dense model's steps are cheaper than one by one


@dataclass(frozen=True)
class Schedule:
    """How many rounds with how many clients, and when to look."""

    rounds: int
    cohort: int  # M, clients per round
    seed: int
    evaluate_every: int = 1  # rounds; the last one always


class Outcome(NamedTuple):
    """What a run leaves."""

    params: Params  # the sent model
    evaluated: Params  # the evaluated one; the same object unless a method says otherwise
    buffers: Params
    rows: list[dict[str, float]]  # of rounds.csv
    tensors: Params  # "<component>/<quantity>", [T, ...]: what else was recorded, on the CPU


def resolve_device(name: str) -> torch.device:
    """`auto` is CUDA if there is any. UserError for an unknown device, or for CUDA where there is none."""
    if name not in DEVICES:
        raise UserError(f"device {name!r} is unknown{nearest(name, DEVICES)}; allowed: {', '.join(DEVICES)}")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError("device 'cuda': this machine has no usable CUDA device; allowed here: auto, cpu")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def abreast(steps: Sequence[int], cohort: int) -> float:
    """How many of `cohort` clients, of all those with so many steps each, move at a time on average."""
    drawn = cohort / len(steps)
    one_by_one = sum(steps) * drawn
    # Of each group that can run side by side, as many steps as the longest has, if anybody of it is drawn.
    together = [(max(steps[k] for k in group), 1 - (1 - drawn) ** len(group)) for group in chunks(steps, len(steps))]
    return one_by_one / max(sum(longest * share for longest, share in together), 1)


def choose_engine(name: str, network: Network, device: torch.device, together: float) -> tuple[str, str]:
    """(engine, why) for `auto | sequential | vectorized`. UserError for another name, or for what vmap can't take.

    `together`: how many clients move at a time on average if the cohort runs side by side. The choice is by counts and
    not by the clock, for it decides about the last bits of a run.
    """
    if name not in ENGINES:
        raise UserError(f"engine {name!r} is unknown{nearest(name, ENGINES)}; allowed: {', '.join(ENGINES)}")
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


def initial_model(network: Network, seed: int, like: torch.Tensor) -> tuple[Params, Params]:
    """(w_0, buffers) of a seed, the same in every runtime; dtype and device of `like`."""
    params, buffers = network.init(torch_stream(seed, "init"))
    return tree_map(lambda p: p.to(like), params), tree_map(lambda b: b.to(like), buffers)


def start(
    algorithm: Algorithm, network: Network, local: LocalTraining, seed: int, like: torch.Tensor
) -> tuple[Task, Params, Params]:
    """(task, w_0, buffers) of an algorithm; parameters that stay as they are belong to the task, not to w_0.

    RecipeError if there are no others.
    """
    params, buffers = initial_model(network, seed, like)
    fixed = {name: params[name] for name in sorted(algorithm.fixed(network) | network.frozen)}
    trained = {name: leaf for name, leaf in params.items() if name not in fixed}
    if not trained:
        raise RecipeError(
            f"{algorithm.name}: of train.model = {network.name!r} nothing would be left to train, as it has no layer "
            "before its classifier; use a model with a hidden layer, such as mlp"
        )
    return Task(network, algorithm.optimizer(local.build()), fixed, precision=local.precision), trained, buffers


def desk(task: Task, public: Samples | None, seed: int, round_: int, like: torch.Tensor) -> Desk:
    """What the server has at hand in a round; 0 is before the first. `like`: samples, for their shape and device."""
    at = torch.tensor(key(seed, "server", round_), device=like.device)
    return Desk(task, public, at, tuple(like.shape[1:]))


def with_shared(
    algorithm: Algorithm, train: Samples, clients: Sequence[Ints], public: Samples | None
) -> tuple[Samples, Sequence[Ints]]:
    """(samples, positions by client) where every client has the public samples that the algorithm gives to all.

    These stay clean: they are the server's, and the same for every client.
    """
    shared = 0 if public is None else algorithm.shared(len(public.y))
    if public is None or not shared:
        return train, clients
    noise = train.noise
    if noise is not None:
        clean = noise.row.new_full((shared,), len(noise.std) - 1)
        noise = noise._replace(row=torch.cat([noise.row, clean]))
    joined = Samples(torch.cat([train.x, public.x[:shared]]), torch.cat([train.y, public.y[:shared]]), noise)
    added = np.arange(len(train.y), len(train.y) + shared)
    return joined, [np.concatenate([positions, added]) for positions in clients]


def draw_cohort(seed: int, round_: int, n_clients: int, size: int) -> tuple[int, ...]:
    """`size` clients, uniformly without replacement, ascending; the same for every recipe."""
    if size == n_clients:
        return tuple(range(n_clients))
    chosen = stream(seed, "cohort", round_).choice(n_clients, size, replace=False)
    return tuple(sorted(chosen.tolist()))


def drive(asks: Asks, answer: Callable[[Ask], Reply]) -> Any:
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
        network: Network,
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
    ) -> None:
        """Everything lives on the device of `train`. Goes on from `checkpoint` if there is one. Raises UserError.

        `observing`: whether what only clients know is recorded as well, which may cost further passes over data.
        `workers`: how many processes the sequential engine may take on a CPU, for the same bits.
        """
        n = len(clients)
        if not 1 <= schedule.cohort <= n:
            raise UserError(
                f"cohort of {schedule.cohort} clients: must be at least 1 and at most the {n} clients there are"
            )
        setting = Setting(
            n, schedule.cohort, network.n_classes, network.feature_size, local.optimizer, local.lr,
            0 if public is None else len(public.y), network.tokens,
        )  # fmt: skip
        self.algorithm = recipes.build(recipe, settings, setting)
        if self.algorithm.leak:
            public = test
        if self.algorithm.pools:
            clients, schedule = [np.concatenate(list(clients))], replace(schedule, cohort=1)
        train, clients = with_shared(self.algorithm, train, clients, public)
        n = len(clients)
        self.schedule, self.public = schedule, public
        per_round = [
            local.steps or local.epochs * math.ceil(len(positions) / local.batch_size) for positions in clients
        ]
        together = abreast(per_round, schedule.cohort)
        self.engine_name, self.engine_reason = choose_engine(engine, network, train.x.device, together)
        task, params, buffers = start(self.algorithm, network, local, schedule.seed, train.x)
        store = Clients(
            self.algorithm, task, local, schedule.seed, train, dict(enumerate(clients)), public, params, buffers,
            observing,
        )  # fmt: skip
        processes = min(workers, schedule.cohort) if train.x.device.type == "cpu" else 1
        self.engine: Engine
        if self.engine_name == "vectorized":
            self.engine = Vectorized(store, memory_mb)
        elif processes > 1:
            self.engine = Workers(store, processes, schedule.cohort)
        else:
            self.engine = Sequential(store)
        self.server = self.algorithm.init(params, buffers, self._desk(0))
        self.evaluated = params
        self.recorder = Recorder(task, test, validation, observing)
        self.start_round = 0
        self.checkpoint, self.checkpoint_every, self.fingerprint = checkpoint, checkpoint_every, fingerprint
        if checkpoint is not None and checkpoint.exists():
            self._resume(checkpoint)

    def run(self) -> Outcome:
        """Runs the rounds that are left. Raises NonFiniteError."""
        for _ in self.rounds():
            pass
        return self.outcome

    def rounds(self) -> Iterator[Mapping[str, float]]:
        """Runs a round that is left each time that it is asked for a row. Raises NonFiniteError."""
        everybody = tuple(range(len(self.engine.clients.indices)))
        if self.start_round == 0:
            self.server = drive(self.algorithm.begin(self.server, everybody), partial(self._answer, 0))
        for t in range(self.start_round + 1, self.schedule.rounds + 1):
            yield self._round(t, everybody)
            if self.checkpoint is not None and (t % self.checkpoint_every == 0 or t == self.schedule.rounds):
                self._save(self.checkpoint, t)

    @property
    def outcome(self) -> Outcome:
        """What the rounds so far leave."""
        whole = self.recorder.task.whole
        return Outcome(
            whole(self.server.params), whole(self.evaluated), self.server.buffers, self.rows, self.recorder.tensors
        )

    @property
    def rows(self) -> list[dict[str, float]]:
        """The rows of rounds.csv so far."""
        return self.recorder.rows

    def _desk(self, t: int) -> Desk:
        clients = self.engine.clients
        return desk(clients.task, self.public, self.schedule.seed, t, clients.train.x)

    def _round(self, t: int, everybody: tuple[int, ...]) -> dict[str, float]:
        self.recorder.begin(self.server)
        cohort = draw_cohort(self.schedule.seed, t, len(everybody), self.schedule.cohort)
        answer, at_hand = partial(self._answer, t), self._desk(t)
        done: Round = drive(self.algorithm.round(self.server, cohort, at_hand), answer)
        last = t == self.schedule.rounds
        if last:
            server, evaluated = drive(self.algorithm.finish(done.server, done.evaluated, everybody, at_hand), answer)
            done = done._replace(server=server, evaluated=evaluated)
        self.server, self.evaluated = done.server, done.evaluated
        return self.recorder.end(t, done, last or t % self.schedule.evaluate_every == 0)

    def _answer(self, t: int, ask: Ask) -> Reply:
        reply = self.engine.answer(ask, t)
        self.recorder.exchange(ask, reply, t)
        return reply

    def _trees(self) -> Tree:
        return {
            "server": self.server._asdict(),
            "memory": self.engine.clients.memory,
            "evaluated": self.evaluated,
        }

    def _save(self, path: Path, t: int) -> None:
        recorder = self.recorder
        holders = recorder.meter.holders(self.server.params)
        found = checkpoints.Checkpoint(t, self._trees(), holders, self.rows, recorder.tensors)
        checkpoints.write(path, found, self.fingerprint)

    def _resume(self, path: Path) -> None:
        found = checkpoints.read(path, self._trees(), self.fingerprint)
        self.server = Server(**found.trees["server"])
        self.engine.clients.memory = found.trees["memory"]
        self.evaluated, self.start_round = found.trees["evaluated"], found.round
        self.recorder.rows, self.recorder.tensors = found.rows, found.recorded
        self.recorder.meter.restore(self.server.params, found.holders)
