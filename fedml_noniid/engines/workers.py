"""Runs the sequential engine in several processes of one thread, with the same bits: for
convolutions on a CPU.

The processes are forked once. They share the memory of the data, the clients' memories, the models
and the answers. They take clients in pieces that become smaller, so that they end together even
where one core is slower than another. What a client holds for the rest of a round stays with the
process that trained it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedml_noniid.core.algorithm import TRAIN
from fedml_noniid.core.component import Ask, Reply
from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import Params, Tree, n_bytes, row, tree_map
from fedml_noniid.engines.clients import Clients
from fedml_noniid.engines.forks import end_with, finalize, settle
from fedml_noniid.engines.sequential import Sequential
from fedml_noniid.engines.storage import SharedStorage, rows_for, shared

SUMS = "sums"  # in place of a job: what a process has added up in this round
# an answer's memory, in models per client: the client's own, and what methods send beside it
MODELS_PER_ANSWER = 4


class _Worker(NamedTuple):
    process: multiprocessing.process.BaseProcess
    connection: Connection
    answers: SharedStorage

    def send(self, what: tuple[Any, ...]) -> None:
        """Sends a piece of work."""
        with _alive():
            self.connection.send(what)

    def receive(self) -> Tree:
        """Returns the slots of an answer. Raises the worker's error."""
        with _alive():
            message: Tree | BaseException = self.connection.recv()
        if isinstance(message, BaseException):
            raise message
        return message


@contextmanager
def _alive() -> Iterator[None]:
    """Inside, UserError if a worker has ended."""
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise UserError(
            "a worker process ended without an answer; was it killed for lack of memory?"
        ) from None


class Workers:
    """Answers an Ask with `processes` processes, which end with this object or with the process
    that made it.

    `cohort`: how many clients are asked at a time.
    """

    def __init__(
        self, clients: Clients, processes: int, cohort: int, streams: bool = False
    ) -> None:
        """`streams`: as in `Sequential`; each process adds up, and this one adds up their sums."""
        self.clients, self.processes, self.cohort = clients, processes, cohort
        self.streams = streams
        self._workers: list[_Worker] = []
        self._asks, self._updates = SharedStorage(0), Params()
        self._home: dict[int, int] = {}  # client -> worker that trained it last

    def answer(self, ask: Ask, round_: int) -> Reply:
        """The stacked replies of the clients `ask.to`."""
        if not self._workers:
            self._start(ask)
        return in_parts(ask, self.clients.memory.at_once, lambda part: self._answer(part, round_))

    def _answer(self, ask: Ask, round_: int) -> Reply:
        """The replies of clients whose memories may be held at a time."""
        sizes = [len(self.clients.indices[client]) for client in ask.to]
        left = sorted(range(len(ask.to)), key=lambda position: (-sizes[position], position))
        self._asks.clear()
        trees = {
            "params": ask.params,
            "buffers": ask.buffers,
            "shared": ask.shared,
            "each": ask.each,
        }
        slots = self._asks.put(trees)
        busy: dict[Connection, tuple[int, list[int]]] = {}
        answers: list[Tree] = []
        rows: list[Tensor] = []

        def give(number: int, first: bool) -> None:
            if piece := self._piece(ask, left, sizes, number):
                worker = self._workers[number]
                worker.send((ask.job, ask.to, ask.owner, slots, round_, piece, first))
                busy[worker.connection] = number, piece

        for number in range(self.processes):
            give(number, first=True)
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                number, piece = busy.pop(connection)
                worker = self._workers[number]
                answers.append(worker.answers.get(worker.receive()))
                rows.append(torch.tensor(piece))
                give(number, first=False)

        stacked = together(len(ask.to), rows, answers)
        if ask.job == TRAIN:
            stacked |= self._summed(ask) if self.streams else self._held(ask)
        return Reply(ask.to, **stacked)

    def _held(self, ask: Ask) -> Tree:
        return {"deltas": row(self._updates, slice(len(ask.to)))}

    def _summed(self, ask: Ask) -> Tree:
        """The sums of what each process has added up."""
        sums = self.clients.sums(ask)
        for number in {self._home[client] for client in ask.to}:
            worker = self._workers[number]
            worker.send((SUMS, ask.to, "", {}, 0, [], True))
            sums.absorb(worker.answers.get(worker.receive()))
        return sums.parts

    def _start(self, ask: Ask) -> None:
        model = n_bytes(ask.params) + n_bytes(ask.buffers) + (1 << 20)
        self.clients.memory.share()
        self._asks = SharedStorage(MODELS_PER_ANSWER * model * (1 + self.cohort))
        if not self.streams:
            self._updates = rows_for(ask.params, self.cohort, shared)
        context = multiprocessing.get_context("fork")
        settle()
        for _ in range(self.processes):
            ours, theirs = context.Pipe()
            answers = SharedStorage(MODELS_PER_ANSWER * model * self.cohort)
            others = [*(worker.connection for worker in self._workers), ours]
            arguments = (
                os.getpid(),
                Sequential(self.clients, self._updates, self.streams),
                self._asks,
                answers,
                theirs,
                others,
            )
            process = context.Process(target=_work, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process, ours, answers))
        finalize(self, _end, self._workers)

    def _piece(self, ask: Ask, left: list[int], sizes: Sequence[int], number: int) -> list[int]:
        """Takes from `left`, positions in the Ask, what worker `number` does next; large clients
        come first."""
        if ask.params or ask.job == TRAIN:
            piece = left[: portion([sizes[position] for position in left], self.processes)]
        else:  # a client goes on from what it holds
            piece = [position for position in left if self._home[ask.to[position]] == number]
        if ask.job == TRAIN:
            self._home |= dict.fromkeys((ask.to[position] for position in piece), number)
        gone = set(piece)
        left[:] = [position for position in left if position not in gone]
        return sorted(piece)


def in_parts(ask: Ask, at_once: int, answer: Callable[[Ask], Reply]) -> Reply:
    """The replies to an Ask that is answered for `at_once` clients at a time."""
    m = len(ask.to)
    if m <= at_once:
        return answer(ask)
    parts = [slice(at, min(at + at_once, m)) for at in range(0, m, at_once)]
    replies = [answer(ask._replace(to=ask.to[at], each=row(ask.each, at))) for at in parts]
    trees = [vars(reply) | {"clients": {}} for reply in replies]
    whole = tree_map(lambda *leaves: torch.cat(leaves), *trees)
    return Reply(**whole | {"clients": ask.to})


def together(m: int, rows: Sequence[Tensor], answers: Sequence[Tree]) -> Tree:
    """The answers of `m` clients, of which `rows` says the places of those in each of `found`."""

    def joined(*parts: Tensor) -> Tensor:
        out = parts[0].new_empty((m, *parts[0].shape[1:]))
        for at, part in zip(rows, parts, strict=True):
            out.index_copy_(0, at, part)
        return out

    return tree_map(joined, *answers)


def portion(sizes: Sequence[int], processes: int) -> int:
    """How many of the remaining clients one process takes at a time: half of its share of their
    samples."""
    load, whole = 0, sum(sizes)
    for number, size in enumerate(sizes, start=1):
        load += size
        if 2 * processes * load >= whole:
            return number
    return 0


def _end(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.connection.close()
        # it may be in the middle of a long piece whose answer nobody needs any more
        worker.process.kill()
    for worker in workers:
        worker.process.join()


def _work(
    parent: int,
    engine: Sequential,
    asks: SharedStorage,
    answers: SharedStorage,
    connection: Connection,
    others: list[Connection],
) -> None:
    """In a worker: answers until the other end is closed."""
    end_with(parent)
    for other in others:
        other.close()  # an open copy here would hide from the other process that the end was closed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides what an interrupt ends
    torch.set_num_threads(1)
    try:
        while True:
            job, to, owner, slots, round_, piece, first = connection.recv()
            if first:
                answers.clear()
            try:
                if job == SUMS and engine.sums is not None:
                    connection.send(answers.put(engine.sums.state()))
                    continue
                ask = Ask(job, to, owner=owner, **asks.get(slots))
                if first and engine.streams and job == TRAIN:
                    engine.sums = engine.clients.sums(ask)
                connection.send(answers.put(engine.some(ask, round_, piece)))
            except Exception as error:  # of any kind: the main process raises it again
                error.add_note("in a worker process:\n" + traceback.format_exc())
                # Where dask is imported, a pickle has them too, and may be too deep to be made.
                error.__cause__ = error.__context__ = None
                connection.send(error.with_traceback(None))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        os._exit(0)  # without clean-up: what was inherited belongs to the main process
