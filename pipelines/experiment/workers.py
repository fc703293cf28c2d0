"""Work side by side in forked processes, which have the slow imports done and go when this process goes."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.queues import SimpleQueue
from typing import TypeVar

import torch

from pipelines.experiment import progress
from plugins.engines.workers import end_with

Item = TypeVar("Item")
Result = TypeVar("Result")


def how_many(asked: int | None, threads: int, on_gpu: bool) -> int:
    """The processes for work that takes `threads` each: as asked, or one per core and thread; one alone on a GPU."""
    if asked is not None:
        return asked
    return 1 if on_gpu else max(1, len(os.sched_getaffinity(0)) // threads)


def side_by_side(
    work: Callable[[Item], Result], items: Sequence[Item], processes: int, display: progress.Display
) -> Iterator[tuple[Item, Result]]:
    """Each item with what `work` makes of it, as they come; in this process if one is enough.

    The first error ends it: work that has begun is finished, work that waits is not begun. An interrupt ends all.
    """
    if processes == 1 or len(items) < 2:
        for item in items:
            yield item, work(item)
        return
    # Threads of its own would not survive the fork.
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    queue: SimpleQueue[progress.Round | None] = context.SimpleQueue()
    pool = concurrent.futures.ProcessPoolExecutor(min(processes, len(items)), context, _begin, (os.getpid(), queue))
    futures = {pool.submit(work, item): item for item in items}
    reader = display.follow(queue)
    try:
        for future in concurrent.futures.as_completed(futures):
            yield futures[future], future.result()
    except KeyboardInterrupt:
        for process in multiprocessing.active_children():
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        queue.put(None)
        reader.join()


def _begin(parent: int, queue: SimpleQueue[progress.Round | None]) -> None:
    """In a worker: it goes when the process that started it does, which decides what an interrupt ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    progress.listen(queue.put)
    end_with(parent)
