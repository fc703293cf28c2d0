"""Divides the clients of each round among the workers of a cluster, with the bits of one process.

The run stays here: cohorts, averages, tests, checkpoints. Each worker has the data of the item. It
gets a piece of each Ask: the model, its clients, and their memories unless it has the newest. It
sends their answers back, added up where nobody reads single ones. If a worker dies, another one
gets its piece, and repeats the round's training where later Asks need it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import queue
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from distributed import Client, Future, KilledWorker
from distributed.client import CancelledError
from distributed.protocol import to_serialize
from torch import Tensor

from fedml_noniid.pipelines.cluster.front import (
    CONTINUES,
    LOOK_S,
    LOST,
    MAX_LOSSES,
    FitWorkers,
    connected,
)
from fedml_noniid.pipelines.cluster.job import Job
from fedml_noniid.pipelines.cluster.piece import OP, Answers, Piece, pack, serve, unpack, with_trees
from fedml_noniid.pipelines.experiment.workspace import Cluster
from fedml_noniid.plugins.core.algorithm import TRAIN
from fedml_noniid.plugins.core.component import Ask, Reply
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.core.trees import Params, leaves, row, tree_map
from fedml_noniid.plugins.engines.clients import Clients, numbers
from fedml_noniid.plugins.engines.sequential import Sequential
from fedml_noniid.plugins.engines.simulation import Simulation
from fedml_noniid.plugins.engines.storage import rows_for
from fedml_noniid.plugins.engines.workers import in_parts, together

T = TypeVar("T")
log = logging.getLogger(__name__)
# A round of a smaller model is soon over, and items are worth more than a share of one.
MIN_PARAMETERS = 1_000_000
JOIN_S = 10.0  # seconds that the first round waits for workers that are not ready yet


def may_divide(jobs: Sequence[Job]) -> bool:
    """Whether the rounds of these items, one after the other, may be divided among workers."""
    wanted = jobs[0].settings.machine.on_cluster if jobs else "items"
    return wanted == "clients" or (wanted == "auto" and len(jobs) == 1)


@contextlib.contextmanager
def divided(
    cluster: Cluster, job: Job, wanted: Mapping[str, str], simulation: Simulation
) -> Iterator[bool]:
    """Inside, workers with the traits `wanted` train the clients of the item's rounds, if that is
    wanted or pays. Yields whether they do. Raises UserError.

    `simulation`: of the item, before its next round.
    """
    forced = job.settings.machine.on_cluster == "clients"
    clients = simulation.engine.clients
    n = sum(leaf.numel() for leaf in leaves(clients.start.params))
    obstacle = _obstacle(simulation)
    if obstacle and forced:
        log.warning("%s: a worker trains the whole item: %s", job.unit.key, obstacle)
    if obstacle or not (forced or n > MIN_PARAMETERS):
        yield False
        return
    with connected(cluster) as client:
        workers = FitWorkers(client, wanted)
        there = len(workers.found())
        if not forced and there < 2:
            yield False
            return
        why = (
            "machine.on_cluster is clients"
            if forced
            else f"no other item is left, and {n:,} parameters are more than {MIN_PARAMETERS:,}"
        )
        log.info("%s: the clients of a round are divided among workers: %s", job.unit.key, why)
        simulation.engine = Divided(client, workers, job, clients, simulation.adds_up)
        yield True


def _obstacle(simulation: Simulation) -> str:
    """Why the clients of a round can't be divided; "" if they can."""
    clients = simulation.engine.clients
    if not isinstance(simulation.engine, Sequential):
        return f"its engine is {simulation.engine_name} ({simulation.engine_reason})"
    if clients.device.type != "cpu":
        return "rounds are divided on CPUs only"
    one = clients.start.plan.cohort == 1 or simulation.algorithm.needs.pooled
    return "a round has one client" if one else ""


@dataclass(eq=False)
class _Seat:
    """A worker that answers for pieces, or will."""

    address: str
    worker: str  # its name
    future: Future  # of the task that answers there
    is_ready: bool = False
    newest: set[int] = field(default_factory=set)  # clients of whom it has the newest memory
    trained: set[int] = field(default_factory=set)  # clients whose training of this round it has


class Divided:
    """Answers an Ask by the workers of a cluster, each for a piece of the cohort."""

    def __init__(
        self, client: Client, workers: FitWorkers, job: Job, clients: Clients, streams: bool
    ) -> None:
        """`streams`: whether each worker adds up, and this process adds up their sums."""
        self.clients, self.streams = clients, streams
        self._client, self._workers = client, workers
        self._job = job._replace(topic=f"noniid-{secrets.token_hex(4)}")
        self._seats: dict[str, _Seat] = {}  # by name
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._looked = 0.0
        self._calls: dict[str, tuple[Piece, concurrent.futures.Future[Any]]] = {}  # by seat
        self._waiting: list[tuple[Piece, str]] = []  # pieces, and the seat that each is for
        self._losses: Counter[tuple[int, ...]] = Counter()  # by the clients of a piece
        self._found: list[tuple[Piece, Answers]] = []
        self._training: dict[int, Piece] = {}  # client -> its training of this round
        self._updates = Params()
        self._first = True  # Ask
        client.subscribe_topic(
            self._job.topic, lambda event: self._news.put(partial(self._ready, event[1]))
        )

    def answer(self, ask: Ask, round_: int) -> Reply:
        """The stacked replies of the clients `ask.to`."""
        return in_parts(ask, self.clients.memory.at_once, lambda part: self._answer(part, round_))

    def _answer(self, ask: Ask, round_: int) -> Reply:
        """The replies of clients whose memories may be held at a time."""
        if ask.job == TRAIN:
            self._training.clear()
            for seat in self._seats.values():
                seat.trained.clear()
        self._hear(0)
        self._wait()
        self._losses.clear()
        self._found.clear()
        self._waiting = self._divide(ask, round_)
        while self._waiting or self._calls:
            self._give()
            self._hear(LOOK_S)
        return self._reply(ask)

    def _divide(self, ask: Ask, round_: int) -> list[tuple[Piece, str]]:
        """The pieces of an Ask: those of the round's training, or new ones."""
        pieces: dict[Any, list[int]] = {}  # positions in the Ask
        trained = ask.job != TRAIN and self._training.keys() >= {*ask.to}
        if trained:
            for position, client in enumerate(ask.to):
                pieces.setdefault(self._training[client].positions, []).append(position)
        else:
            ready = [name for name, seat in self._seats.items() if seat.is_ready]
            sizes = [len(self.clients.indices[client]) for client in ask.to]
            pieces = dict(zip(ready, balanced(sizes, len(ready)), strict=False))
        packed = with_trees(ask._replace(each={}), pack)
        found = []
        for name, positions in pieces.items():
            each = row(ask.each, numbers(positions, self.clients.device))
            to = tuple(ask.to[position] for position in positions)
            if trained:
                where = (name for name, seat in self._seats.items() if seat.trained >= {*to})
                name = next(where, "")
            piece = packed._replace(to=to, each=pack(each))
            found.append((Piece(round_, piece, ask.to, tuple(positions)), name))
        return found

    def _give(self) -> None:
        """Gives each piece to its seat, or to a free one if that is lost."""
        left = []
        for piece, name in sorted(self._waiting, key=lambda one: one[1] not in self._seats):
            free = [
                name
                for name, seat in self._seats.items()
                if seat.is_ready and name not in self._calls
            ]
            to = name if name in self._seats else next(iter(free), "")
            if to in free:
                self._send(piece, to)
            else:
                left.append((piece, name))
        self._waiting = left

    def _send(self, piece: Piece, name: str) -> None:
        """Gives a piece to a free seat."""
        seat, ask = self._seats[name], piece.ask
        if not (ask.params or ask.job == TRAIN or seat.trained.issuperset(ask.to)):
            piece = piece._replace(training=self._training[ask.to[0]])
        has = piece.training is None and seat.newest.issuperset(ask.to)
        repeated = self.clients.asked_again(ask)
        if repeated or not has:
            piece = piece._replace(memory=pack(self.clients.memory.rows(ask.to)))
        if repeated:
            self._training |= dict.fromkeys(ask.to, piece)
        sent = piece._replace(memory=None) if has else piece

        async def call() -> Any:
            return await getattr(self._client.rpc(seat.address), OP)(
                seat=name, piece=to_serialize(sent)
            )

        made = asyncio.run_coroutine_threadsafe(call(), self._client.loop.asyncio_loop)
        self._calls[name] = sent, made
        made.add_done_callback(lambda _: self._news.put(partial(self._done, name)))

    def _done(self, name: str) -> None:
        """A call has ended."""
        if name not in self._calls:
            return
        seat, (piece, made) = self._seats[name], self._calls[name]
        try:
            # None: the worker has no seat any more.
            answers = (made.result() or {}).get("answers")
        except OSError:
            answers = None
        if answers is None:
            self._lose(name)
            return
        del self._calls[name]
        answers = self._own(answers)
        clients = {*piece.ask.to}
        if answers.memory:
            self.clients.memory.put(piece.ask.to, unpack(answers.memory))
            for other in self._seats.values():
                other.newest -= clients
        seat.newest = clients if piece.memory is not None else seat.newest | clients
        for done in (piece, piece.training):
            if done is not None and done.ask.job == TRAIN:
                seat.trained.update(done.ask.to)
        self._found.append((piece, answers))

    def _own(self, found: T | UserError | str) -> T:
        """What a worker returned. Raises the item's error."""
        if isinstance(found, UserError):
            raise found
        if isinstance(found, str):
            raise RuntimeError(f"{self._job.unit.key}, on a worker:\n{found}")
        return found

    def _reply(self, ask: Ask) -> Reply:
        """The replies to an Ask from the answers to its pieces."""
        m, trains = len(ask.to), ask.job == TRAIN
        rows = [torch.tensor(piece.positions) for piece, _ in self._found]
        answers = [unpack(answers.rows) for _, answers in self._found]
        if trains and self.streams:
            sums = self.clients.sums(ask)
            for _, of in self._found:
                sums.absorb(unpack(of.sums))
            return Reply(ask.to, **together(m, rows, answers), **sums.parts)
        deltas = [one.pop("deltas") for one in answers] if trains else []
        stacked = together(m, rows, answers)
        if trains:
            if not self._updates or len(next(iter(self._updates.values()))) < m:
                self._updates = rows_for(ask.params, m)  # as they lie in one process
            stacked["deltas"] = row(self._updates, slice(m))
            for at, part in zip(rows, deltas, strict=True):
                tree_map(partial(_put_rows, at), stacked["deltas"], part)
        return Reply(ask.to, **stacked)

    def _wait(self) -> None:
        """Waits for a ready seat; before the first answer also for the others, up to JOIN_S."""
        until = time.monotonic() + (JOIN_S if self._first else 0)
        self._first = False
        while True:
            ready = [seat.is_ready for seat in self._seats.values()]
            if ready and (all(ready) or (any(ready) and time.monotonic() > until)):
                return
            self._hear(LOOK_S)

    def _hear(self, seconds: float) -> None:
        """Takes the news that come within so many seconds, and looks at the workers."""
        with contextlib.suppress(queue.Empty):
            self._news.get(timeout=seconds)()
            while True:
                self._news.get_nowait()()
        if time.monotonic() - self._looked >= LOOK_S:
            there, self._looked = self._workers.found(), time.monotonic()
            for name, seat in [*self._seats.items()]:
                if seat.address not in there:
                    self._lose(name)
            for address in there.keys() - {seat.address for seat in self._seats.values()}:
                self._sit(address, there[address])

    def _sit(self, address: str, worker: str) -> None:
        """Has a worker answer, as soon as it is free."""
        name = secrets.token_hex(4)
        future = self._client.submit(
            serve,
            self._job,
            name,
            self.streams,
            key=f"{self._job.unit.key}-{name}",
            pure=False,
            retries=0,
            workers=[address],
            resources=self._workers.resources,
        )
        self._seats[name] = _Seat(address, worker, future)
        future.add_done_callback(lambda _: self._news.put(partial(self._ended, name)))

    def _ready(self, name: str) -> None:
        """A seat answers from here on."""
        if name in self._seats:
            self._seats[name].is_ready = True

    def _ended(self, name: str) -> None:
        """The task of a seat has ended."""
        if name not in self._seats:
            return
        try:
            self._own(self._seats[name].future.result())
        except (OSError, CancelledError):
            raise UserError(f"{LOST}; {CONTINUES}") from None
        except KilledWorker:
            pass
        self._lose(name)

    def _lose(self, name: str) -> None:
        """Forgets a seat, and gives its piece to another. UserError if that lost several."""
        seat = self._seats.pop(name)
        seat.future.cancel()
        if seat.is_ready:
            words = "%s: lost worker %s, its clients go on elsewhere"
            log.warning(words, self._job.unit.key, seat.worker)
        if name not in self._calls:
            return
        piece, made = self._calls.pop(name)
        made.cancel()
        self._waiting.append((piece._replace(memory=None, training=None), ""))
        self._losses[piece.positions] += 1
        if self._losses[piece.positions] >= MAX_LOSSES:
            raise UserError(
                f"{self._job.unit.key}: {MAX_LOSSES} workers died with the same clients of round "
                f"{piece.round}, one after the other; is their memory enough?"
            )


def balanced(sizes: Sequence[int], n: int) -> list[list[int]]:
    """The positions of clients with so many samples in at most `n` pieces with about as many
    samples each."""
    pieces: list[list[int]] = [[] for _ in range(min(n, len(sizes)))]
    loads = [0] * len(pieces)
    for position in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
        least = loads.index(min(loads))
        pieces[least].append(position)
        loads[least] += sizes[position]
    return [sorted(piece) for piece in pieces]


def _put_rows(at: Tensor, rows: Tensor, part: Tensor) -> None:
    rows.index_copy_(0, at, part)
