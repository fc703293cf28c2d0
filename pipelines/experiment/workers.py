"""Runs items side by side, in processes that end when this process ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import torch

from fedml_noniid.engines.device import cards
from fedml_noniid.engines.forks import autograd_survives_fork
from fedml_noniid.engines.pool import Pool, Report
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
    processes, waiting = min(processes, len(items)), iter(items)
    works = [partial(_reporting, work)] * processes
    pool = Pool(works, display.show, cards(processes) if on_gpu else ())
    try:
        for _, item, result in pool.run(lambda _: next(waiting, None)):
            yield item, result
    finally:
        pool.end()


def _reporting(work: Callable[[Item], Result], report: Report, item: Item) -> Result:
    progress.report_to(report)
    return work(item)
