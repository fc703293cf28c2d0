"""One progress display for all items and processes of a stage, with the time left.

On a terminal and in a notebook it is a bar. Elsewhere it prints a plain line now and then.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from typing import Any, NamedTuple

SHORT_S, EVERY_S = 2, 30  # seconds between two plain lines: about ended items, about running items
PAGE_S = 0.2  # seconds between two pictures of the bar in a notebook


class RoundReport(NamedTuple):
    """An item's report after a round."""

    item: str
    done: int
    rounds: int
    accuracy: float


_receive: Callable[[RoundReport], None] | None = None  # receives the reports of this process


def report(news: RoundReport) -> None:
    """Reports a round of an item. Every training process calls it after each round."""
    if _receive is not None:
        _receive(news)


def report_to(receive: Callable[[RoundReport], None] | None) -> None:
    """Sets the function that receives the reports of this process."""
    global _receive
    _receive = receive


class Display:
    """Shows the progress of `total` items. A context manager; call `done` when an item ends.

    `bars`: whether it may show a bar. `lines`: whether it prints lines.
    """

    def __init__(self, title: str, total: int, bars: bool = True, lines: bool = True) -> None:
        self.title, self.total = title, total
        self._may_have_bar, self._has_lines = bars, lines
        self._ended, self._known = 0, 0  # number of ended items; of those, taken from the store
        self._work = 0.0  # of this process and its workers, in items that have ended
        # item -> the fraction that is done, and the fraction before its first report
        self._running: dict[str, tuple[float, float]] = {}
        self._began = self._last_line = time.monotonic()
        self._lock = threading.Lock()
        self._bar: Any = None
        self._page: Any = None  # where a notebook shows the bar
        self._drawn = 0.0  # when it showed the bar

    def __enter__(self) -> Display:
        notebook = self._may_have_bar and _is_notebook()
        if notebook or (self._may_have_bar and sys.stderr.isatty()):
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            title, note = (
                TextColumn(text) for text in ("{task.description}", "{task.fields[note]}")
            )
            self._bar = Progress(title, BarColumn(), note, console=Console(stderr=True))
            self._bar.add_task(self.title, total=self.total, note="")
            if notebook:
                from IPython.display import display

                # IPython has no types.
                self._page = display(self._bar, display_id=True)  # type: ignore[no-untyped-call]
            else:
                self._bar.start()
        report_to(self.show)
        return self

    def __exit__(self, *_: object) -> None:
        report_to(None)
        if self._page is not None:
            self._page.update(self._bar)
        elif self._bar is not None:
            self._bar.stop()

    def follow(self, queue: SimpleQueue[RoundReport | None]) -> threading.Thread:
        """Reads the reports of other processes until None comes."""

        def read() -> None:
            while (news := queue.get()) is not None:
                self.show(news)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def show(self, news: RoundReport) -> None:
        """A running item has ended a round."""
        with self._lock:
            _, first = self._running.get(news.item, (0, (news.done - 1) / news.rounds))
            self._running[news.item] = news.done / news.rounds, first
            where = f"{news.item} in round {news.done} of {news.rounds}"
            text = f"{where}, accuracy {news.accuracy:.4f}{self._left()}"
            if self._bar is not None:
                self._draw(text)
            elif time.monotonic() - self._last_line > EVERY_S and news.done < news.rounds:
                self._line(f"{self._ended} of {self.total} done; {text}")

    def done(self, item: str, outcome: str, known: bool) -> None:
        """An item has ended. `known`: whether it was taken from the store."""
        with self._lock:
            _, first = self._running.pop(item, (0, 0.0))
            self._ended, self._known = self._ended + 1, self._known + known
            self._work += 0 if known else 1 - first
            text = f"{self._ended} of {self.total}: {item} {outcome}{self._left()}"
            if self._bar is not None:
                self._draw(text)
            elif not known and time.monotonic() - self._last_line > SHORT_S:
                self._line(text)
            if self._ended == self.total:
                fresh, seconds = self.total - self._known, time.monotonic() - self._began
                parts = [f"{self._known} known"] if self._known else []
                parts += [f"{fresh} made in {_clock(seconds)}"] if fresh else []
                self._line(", ".join(parts))

    def _draw(self, note: str) -> None:
        """Moves the bar. A terminal shows it by itself."""
        completed = self._ended + sum(done for done, _ in self._running.values())
        self._bar.update(self._bar.task_ids[0], completed=completed, note=note)
        if self._page is not None and time.monotonic() - self._drawn > PAGE_S:
            self._drawn = time.monotonic()
            self._page.update(self._bar)

    def _line(self, text: str) -> None:
        if self._has_lines:
            self._last_line = time.monotonic()
            sys.stdout.write(f"{self.title}: {text}\n")
            sys.stdout.flush()

    def _left(self) -> str:
        """`, 3 min left`, estimated from the work done so far. Empty before any work is done."""
        work = self._work + sum(done - first for done, first in self._running.values())
        ahead = self.total - self._ended - sum(done for done, _ in self._running.values())
        if work <= 0 or ahead <= 0:
            return ""
        return f", {_clock((time.monotonic() - self._began) / work * ahead)} left"


def _is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


def _clock(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
