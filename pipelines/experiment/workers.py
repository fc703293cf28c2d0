"""Parallel work in processes that end when this process ends.

On a CPU they are forked, and inherit the slow imports. On GPUs they are spawned, as CUDA works
in no fork of a process that has used it; each sees one GPU.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue
from typing import Any, TypeVar

import torch

from fedml_noniid.engines.device import VISIBLE, cards
from fedml_noniid.engines.forks import autograd_survives_fork, end_with, settle
from fedml_noniid.pipelines.experiment import progress

Item = TypeVar("Item")
Result = TypeVar("Result")


def how_many(asked: int | None, threads: int, cards: int) -> int:
    """The number of processes of `threads` threads: `asked`, else one per GPU, of which `cards` are
    used, else as many as the cores allow."""
    if asked is not None:
        return asked
    return cards or max(1, len(os.sched_getaffinity(0)) // threads)


def side_by_side(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    processes: int,
    display: progress.Display,
    on_gpu: bool = False,
) -> Iterator[tuple[Item, Result]]:
    """Yields each item with the result of `work`, in the order of completion.

    One process means this process, as where forked processes could not train.

    Forked processes inherit `work` with all that it holds; only items and results are copied.
    After the first error, running work is finished and waiting work is not started. An interrupt
    ends all work.
    """
    if processes == 1 or len(items) < 2 or not (on_gpu or autograd_survives_fork()):
        for item in items:
            yield item, work(item)
        return
    # torch's threads would not survive the fork.
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn" if on_gpu else "fork")
    # Short messages in a pipe stay whole without a lock, which a killed process would keep.
    reports, sender = context.Pipe(duplex=False)
    others = multiprocessing.active_children()
    seats = context.SimpleQueue()
    for card in cards(processes) if on_gpu else [""] * processes:
        seats.put(card)
    given = os.getpid(), sender, work, seats
    pool = concurrent.futures.ProcessPoolExecutor(
        min(processes, len(items)), context, _begin, given
    )
    settle()
    futures = {pool.submit(_do, item): item for item in items}
    started = [process for process in multiprocessing.active_children() if process not in others]
    reader = display.follow(reports)
    try:
        for future in concurrent.futures.as_completed(futures):
            yield futures[future], future.result()
    except KeyboardInterrupt:
        for process in started:
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        sender.send(None)
        reader.join()
        sender.close()
        reports.close()


_work: Callable[[Any], Any]  # of a worker; the process that starts the workers has none


def _begin(
    parent: int, sender: Connection, work: Callable[[Any], Any], seats: SimpleQueue[str]
) -> None:
    """Runs first in a worker. `seats`: a GPU for each worker; "" on a CPU.

    The worker ignores interrupts and ends when its parent process ends.
    """
    global _work
    _work = work
    if card := seats.get():
        os.environ[VISIBLE] = card
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    progress.report_to(sender.send)
    end_with(parent)


def _do(item: Any) -> Any:
    return _work(item)
