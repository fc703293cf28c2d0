"""Runs the sequential engine in several processes of one thread, with the same bits: for
convolutions on a CPU.

The processes are forked once. They share the memory of the data, the clients' memories, the models
and the answers. They take clients in pieces that become smaller, so that they end together even
where one core is slower than another. What a client holds for the rest of a round stays with the
process that trained it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

import torch

from fedml_noniid.core.algorithm import TRAIN
from fedml_noniid.core.component import Ask, Reply
from fedml_noniid.core.trees import Params, Tree, n_bytes, row, tree_map
from fedml_noniid.engines.clients import Clients
from fedml_noniid.engines.pool import Pool, Report
from fedml_noniid.engines.sequential import Sequential
from fedml_noniid.engines.storage import SharedStorage, rows_for, shared

# an answer's memory, in models per client: the client's own, and what methods send beside it
MODELS_PER_ANSWER = 4
TREES = ("params", "buffers", "shared", "each")  # parts of an Ask
# An Ask whose trees are slots in shared memory, its round, and positions of clients in it.
Piece = tuple[Ask, int, list[int]]


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
        self._pool: Pool | None = None  # begun with the first Ask, whose model has a size
        self._asks, self._answers = SharedStorage(0), list[SharedStorage]()
        self._updates = Params()
        self._home: dict[int, int] = {}  # client -> process that trained it last

    def answer(self, ask: Ask, round_: int) -> Reply:
        """The stacked replies of the clients `ask.to`."""
        pool = self._pool or self._start(ask)
        sizes = [len(self.clients.indices[client]) for client in ask.to]
        left = sorted(range(len(ask.to)), key=lambda position: (-sizes[position], position))
        self._asks.clear()
        sent = ask._replace(**self._asks.put({name: getattr(ask, name) for name in TREES}))
        sums = self.clients.sums(ask)
        stacked: Tree = {}

        def next_piece(number: int) -> Piece | None:
            positions = self._positions(ask, left, sizes, number)
            return (sent, round_, positions) if positions else None

        for number, (*_, positions), slots in pool.run(next_piece):
            answers = self._answers[number].get(slots)
            # Copies: the next piece of this process overwrites them.
            sums.absorb(tree_map(torch.clone, answers.pop("sums")))
            stacked = stacked or tree_map(
                lambda leaf: leaf.new_empty((len(ask.to), *leaf.shape[1:])), answers
            )
            at = torch.tensor(positions)
            tree_map(lambda rows, leaf, at=at: rows.index_copy_(0, at, leaf), stacked, answers)
        if ask.job == TRAIN:
            held = {"deltas": row(self._updates, slice(len(ask.to)))}
            stacked |= sums.parts if self.streams else held
        return Reply(ask.to, **stacked)

    def _start(self, ask: Ask) -> Pool:
        model = n_bytes(ask.params) + n_bytes(ask.buffers) + (1 << 20)
        size = MODELS_PER_ANSWER * model
        self.clients.memory.share()
        self._asks = SharedStorage(size * (1 + self.cohort))
        self._answers = [SharedStorage(size * self.cohort) for _ in range(self.processes)]
        if not self.streams:
            self._updates = rows_for(ask.params, self.cohort, shared)
        engine = Sequential(self.clients, self._updates, self.streams)
        self._pool = Pool(
            [partial(_work, engine, self._asks, answers) for answers in self._answers]
        )
        return self._pool

    def _positions(self, ask: Ask, left: list[int], sizes: Sequence[int], number: int) -> list[int]:
        """Takes from `left`, positions in the Ask, what process `number` does next; large clients
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


def portion(sizes: Sequence[int], processes: int) -> int:
    """How many of the remaining clients one process takes at a time: half of its share of their
    samples."""
    loads, half = accumulate(sizes), sum(sizes) / (2 * processes)
    return next((number for number, load in enumerate(loads, start=1) if load >= half), 0)


def _work(
    engine: Sequential, asks: SharedStorage, answers: SharedStorage, _: Report, piece: Piece
) -> Tree:
    """In a process, with its copy of the engine: returns the slots of the answers to a piece, with
    its "sums" where updates are added up."""
    sent, round_, positions = piece
    ask = sent._replace(**asks.get({name: getattr(sent, name) for name in TREES}))
    engine.sums = engine.clients.sums(ask) if engine.streams else None
    stacked = engine.some(ask, round_, positions)
    answers.clear()
    return answers.put(stacked | {"sums": engine.sums.state() if engine.sums else {}})
