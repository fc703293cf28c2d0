"""Progress over rounds: a bar with ETA on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

Report = Callable[[Mapping[str, float]], None]
LINES = 4  # plain lines per item
QUIET_S = 5  # an item that takes less needs none


@contextmanager
def rounds(title: str, done: int, total: int) -> Iterator[Report]:
    """Yields a function to be called with each row of rounds.csv; `done` rounds are behind us already."""
    if sys.stderr.isatty():
        with _bar(title, done, total) as report:
            yield report
    else:
        yield _lines(title, done, total)


@contextmanager
def _bar(title: str, done: int, total: int) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("accuracy {task.fields[accuracy]}"), console=Console(stderr=True)) as progress:
        bar = progress.add_task(title, total=total, completed=done, accuracy="-")

        def report(row: Mapping[str, float]) -> None:
            progress.update(bar, completed=row["round"], accuracy=f"{row['test_accuracy']:.4f}")

        yield report


def _lines(title: str, done: int, total: int) -> Report:
    began = time.monotonic()
    every = max(1, total // LINES)

    def report(row: Mapping[str, float]) -> None:
        t = int(row["round"])
        if (t % every and t != total) or time.monotonic() - began < QUIET_S:
            return
        left = (time.monotonic() - began) / (t - done) * (total - t)
        sys.stdout.write(f"{title}: round {t}/{total}, accuracy {row['test_accuracy']:.4f}, {left:.0f} s left\n")
        sys.stdout.flush()

    return report
