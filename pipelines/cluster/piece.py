"""What a worker does where the clients of a round are divided: it answers for a piece of a cohort.

An answer is a function of the item, of the clients' memories, and of the Asks of the round. So
another worker can give it too. Messages go from the front to the worker and back, not through
dask's scheduler.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from distributed import get_worker
from distributed.protocol import to_serialize
from numpy.typing import NDArray
from torch import Tensor

from fedml_noniid.pipelines.cluster.job import Job, is_abandoned, or_error, received
from fedml_noniid.plugins.core.algorithm import TRAIN
from fedml_noniid.plugins.core.component import Ask
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.core.trees import Tree, tree_map
from fedml_noniid.plugins.engines.memory import InMemory
from fedml_noniid.plugins.engines.sequential import Sequential
from fedml_noniid.plugins.engines.streaming import ADDED

OP = "noniid_piece"  # dask's name of the handler in a worker
LOOK_S = 0.2  # seconds between two looks whether the front is still there


class Packed(NamedTuple):
    """A tensor as it is sent."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    content: NDArray[np.uint8]


class Piece(NamedTuple):
    """An Ask to some clients of a cohort. Its tensors are packed."""

    round: int
    ask: Ask  # to these clients alone
    cohort: tuple[int, ...]  # all clients that are asked
    positions: tuple[int, ...]  # of these clients in the cohort
    memory: Tree | None = None  # rows of these clients; None: the worker has the newest
    # The training of this round, which the worker has to repeat before it answers.
    training: Piece | None = None


class Answers(NamedTuple):
    """The answers to a piece. Tensors are packed."""

    rows: Tree  # fields of a Reply, one row for each client
    sums: Tree  # what was added up, as from `Sums.state`
    memory: Tree  # rows of the clients, of the methods that may have changed them


def pack(tree: Tree) -> Tree:
    """A tree of tensors on the CPU as it is sent, without a copy of contiguous ones."""
    return tree_map(_packed, tree)


def unpack(tree: Tree) -> Tree:
    """The tensors, in memory of their own: at the addresses of a message, matrix products could
    round differently."""
    return tree_map(_unpacked, tree)


def _packed(leaf: Tensor) -> Packed:
    flat = leaf.detach().contiguous().reshape(-1).view(torch.uint8)
    return Packed(leaf.dtype, tuple(leaf.shape), flat.numpy())


def _unpacked(leaf: Packed) -> Tensor:
    found = torch.empty(leaf.shape, dtype=leaf.dtype)
    found.reshape(-1).view(torch.uint8).numpy()[:] = leaf.content
    return found


def with_trees(ask: Ask, of: Callable[[Tree], Tree]) -> Ask:
    """The Ask with what a function makes of each of its trees."""
    return ask._replace(
        params=of(ask.params), buffers=of(ask.buffers), shared=of(ask.shared), each=of(ask.each)
    )


def serve(job: Job, seat: str, streams: bool) -> UserError | str | None:
    """Answers for pieces of an item's rounds as long as the front is there.

    `seat`: by this name the front asks. `streams`: whether updates are added up here. Returns an
    error of the item as `or_error` does.
    """
    return or_error(lambda: _Seat(received(job)[0].reference(streams), seat).serve(job.topic))


class _Seat:
    """A worker that answers for pieces, one at a time."""

    def __init__(self, engine: Sequential, name: str) -> None:
        self.engine, self.name, self.round = engine, name, -1
        self.waiting: queue.SimpleQueue[tuple[Piece, Future[Any]]] = queue.SimpleQueue()

    def serve(self, topic: str) -> None:
        """Says that it is there, and answers until the front has gone."""
        worker = get_worker()
        worker.handlers[OP] = self.take
        worker.log_event(topic, self.name)
        try:
            while not is_abandoned():
                with contextlib.suppress(queue.Empty):
                    piece, answers = self.waiting.get(timeout=LOOK_S)
                    answers.set_result(or_error(partial(self.answered, piece)))
        finally:
            worker.handlers.pop(OP)  # it holds the clients' data

    async def take(self, seat: str, piece: Piece) -> dict[str, Any]:
        """Answers a call of the front, in dask's thread. "answers": None if this is another
        seat."""
        if seat != self.name:
            return {"answers": None}
        answers: Future[Any] = Future()
        self.waiting.put((piece, answers))
        return {"answers": to_serialize(await asyncio.wrap_future(answers))}

    def answered(self, piece: Piece) -> Answers:
        """The answers of these clients."""
        if piece.training is not None:
            self.answered(piece.training)
        clients = self.engine.clients
        ask = with_trees(piece.ask, unpack)
        trains = ask.job == TRAIN
        if trains and piece.round != self.round:
            clients.trained.clear()
            self.round = piece.round
        if piece.memory is not None:
            places = {client: number for number, client in enumerate(ask.to)}
            clients.memory = InMemory(clients.memory.first, places)
            clients.memory.put(ask.to, unpack(piece.memory))
        sums = None
        if trains and self.engine.streams:
            sums = clients.sums(ask._replace(to=piece.cohort), piece.positions)
        reply = vars(self.engine.answer(ask, piece.round, sums))
        left_out = ("clients", *(ADDED if sums is not None else ()))
        rows = {name: tree for name, tree in reply.items() if name not in left_out}
        memory = clients.memory.rows(ask.to)
        changed = {name: of for name, of in memory.items() if trains or name == ask.owner}
        return Answers(pack(rows), pack({} if sums is None else sums.state()), pack(changed))
