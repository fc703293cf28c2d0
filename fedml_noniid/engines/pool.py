"""Runs jobs in processes that end when this process ends.

On a CPU they are forked: they inherit the slow imports and all memory. On GPUs they are spawned, as
CUDA works in no fork of a process that has used it; each sees one GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any

import torch

from fedml_noniid.core.errors import UserError
from fedml_noniid.engines.device import VISIBLE
from fedml_noniid.engines.forks import end_with, settle

Report = Callable[[Any], None]
Work = Callable[[Report, Any], Any]  # (sends a report, job) -> result
RESULT, ERROR, REPORT = "result", "error", "report"  # kinds of messages from a process


class Pool:
    """Holds a process for each function in `works`, which gets the jobs of that process.

    The processes end with this object, with `end`, or with the process that made them.
    """

    def __init__(
        self, works: Sequence[Work], report: Report = lambda _: None, cards: Sequence[str] = ()
    ) -> None:
        """`report`: receives what a work reports. `cards`: CUDA_VISIBLE_DEVICES of each process,
        which is then spawned; its function and jobs must be picklable."""
        self._report = report
        self._connections: list[Connection] = []
        self.processes: list[BaseProcess] = []
        # In this process only: one that is forked later has a copy of this object.
        self.end = Finalize(self, _end, (self.processes,), exitpriority=0)
        context: Any = multiprocessing.get_context("spawn" if cards else "fork")
        settle()
        for number, work in enumerate(works):
            ours, theirs = context.Pipe()
            card = cards[number] if cards else ""
            process = context.Process(target=_serve, args=(os.getpid(), theirs, work, card))
            process.start()
            theirs.close()
            self._connections.append(ours)
            self.processes.append(process)

    def run(self, next_job: Callable[[int], Any]) -> Iterator[tuple[int, Any, Any]]:
        """Gives each process jobs until `next_job(process)` is None. Yields (process, job, result)
        in the order of completion.

        After an error of a job no other begins, and it is raised when the running ones have ended.
        UserError at once if a process was killed.
        """
        running: dict[int, Any] = {}
        errors: list[Exception] = []

        def give(number: int) -> None:
            job = None if errors else next_job(number)
            if job is not None:
                running[number] = job
                with _alive():
                    self._connections[number].send(job)

        for number in range(len(self.processes)):
            give(number)
        while running:
            for connection in wait([self._connections[number] for number in running]):
                assert isinstance(connection, Connection)
                with _alive():
                    kind, content = connection.recv()
                if kind == REPORT:
                    self._report(content)
                    continue
                number = self._connections.index(connection)
                job = running.pop(number)
                if kind == ERROR:
                    errors.append(content)
                else:
                    yield number, job, content
                give(number)
        if errors:
            raise errors[0]


@contextmanager
def _alive() -> Iterator[None]:
    """Inside, UserError if a process has ended."""
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        raise UserError(
            "a worker process ended without an answer; was it killed for lack of memory?"
        ) from None


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()  # its job may be long, and nobody needs the result any more
    for process in processes:
        process.join()


def _serve(parent: int, connection: Connection, work: Work, card: str) -> None:
    """Runs in a process of the pool: does jobs until it is ended."""
    end_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt ends
    if card:
        os.environ[VISIBLE] = card
    torch.set_num_threads(1)

    def report(content: Any) -> None:
        connection.send((REPORT, content))

    try:
        while True:
            job = connection.recv()
            try:
                result = work(report, job)
                sys.stdout.flush()  # nothing of this process is flushed when it is ended
                connection.send((RESULT, result))
            except Exception as error:  # of any kind: the parent raises it again
                error.add_note("in a worker process:\n" + traceback.format_exc())
                # Where dask is imported, a pickle has them too, and may be too deep to be made.
                error.__cause__ = error.__context__ = None
                connection.send((ERROR, error.with_traceback(None)))
    finally:
        os._exit(0)  # without clean-up: what was inherited belongs to the parent
