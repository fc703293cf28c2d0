"""Work side by side in forked processes, which have the slow imports done and go when this process goes."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from plugins.core.errors import UserError
from plugins.engines.workers import end_with

VARIABLE = "FEDML_NONIID_WORKERS"  # environment: how many; by default one per core and thread, one alone on a GPU

Item = TypeVar("Item")
Result = TypeVar("Result")


def how_many(threads: int, on_gpu: bool) -> int:
    """The number of processes for work that takes `threads` each. UserError for a variable that is no such number."""
    asked = os.environ.get(VARIABLE)
    if asked:
        if not asked.isdigit() or int(asked) == 0:
            raise UserError(f"{VARIABLE}={asked!r} is refused; allowed: a whole number from 1 up")
        return int(asked)
    return 1 if on_gpu else max(1, len(os.sched_getaffinity(0)) // threads)


def side_by_side(
    work: Callable[[Item], Result], items: Sequence[Item], processes: int
) -> Iterator[tuple[Item, Result]]:
    """Each item with what `work` makes of it, as they come; in this process if one is enough.

    The first error ends it; what is being worked on then is finished first, what waits is not begun.
    """
    if processes == 1 or len(items) < 2:
        for item in items:
            yield item, work(item)
        return
    # Threads of its own would not survive the fork.
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    pool = concurrent.futures.ProcessPoolExecutor(processes, context, _begin, (os.getpid(),))
    try:
        futures = {pool.submit(work, item): item for item in items}
        for future in concurrent.futures.as_completed(futures):
            yield futures[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(parent: int) -> None:
    """In a worker: it goes when the process that started it does; its work has no processes of its own, as the cores
    are taken.
    """
    os.environ[VARIABLE] = "1"
    end_with(parent)
