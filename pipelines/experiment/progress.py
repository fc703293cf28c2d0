"""One progress display for all items and processes of a stage, with the time left.

On a terminal it is a bar. Elsewhere it prints plain lines: of a stage now and then, of a call from
Python one for each item, on standard error.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from fedml_noniid.metrics import metric_of

SHORT_S, EVERY_S = 2, 30  # seconds between two plain lines: about ended items, about running items


class RoundReport(NamedTuple):
    """An item's report after a round."""

    item: str
    done: int
    rounds: int
    reached: float
    metric: str = "accuracy"  # the main one, which `reached` is


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

    `bars`: whether it may show a bar, or lines where there is no terminal. `lines`: whether it
    prints lines on standard output in any case, and few of them; a notebook has these too.
    """

    def __init__(self, title: str, total: int, bars: bool = True, lines: bool = True) -> None:
        self.title, self.total = title, total
        self._has_bar = bars and sys.stderr.isatty()
        self._has_lines = lines or (bars and not self._has_bar)
        self._stream = sys.stdout if lines or _is_notebook() else sys.stderr
        self._ended, self._known = 0, 0  # number of ended items; of those, taken from the store
        self._running: dict[str, float] = {}  # item -> the fraction that is done
        self._given = 0.0  # work that this process and its workers found done, in items
        self._began = self._last_line = time.monotonic()
        self._bar: Any = None

    def __enter__(self) -> Display:
        if self._has_bar:
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn

            title, note = (
                TextColumn(text) for text in ("{task.description}", "{task.fields[note]}")
            )
            self._bar = Progress(title, BarColumn(), note, console=Console(stderr=True))
            self._bar.add_task(self.title, total=self.total, note="")
            self._bar.start()
        report_to(self.show)
        return self

    def __exit__(self, *_: object) -> None:
        report_to(None)
        if self._bar is not None:
            self._bar.stop()

    def show(self, news: RoundReport) -> None:
        """A running item has ended a round."""
        if news.item not in self._running:  # it may go on from a checkpoint
            self._given += (news.done - 1) / news.rounds
        self._running[news.item] = news.done / news.rounds
        position = f"{news.item} in round {news.done} of {news.rounds}"
        metric = metric_of(news.metric)
        text = f"{position}, {metric.label} {metric.shown(news.reached)}{self._left()}"
        if self._bar is not None:
            self._draw(text)
        elif news.done < news.rounds:
            self._line(f"{self._ended} of {self.total} done; {text}", EVERY_S)

    def done(self, item: str, outcome: str, known: bool) -> None:
        """An item has ended. `known`: whether it was taken from the store."""
        self._running.pop(item, None)
        self._ended, self._known = self._ended + 1, self._known + known
        self._given += known
        text = f"{self._ended} of {self.total}: {item} {outcome}{self._left()}"
        if self._bar is not None:
            self._draw(text)
        elif not known:
            self._line(text, SHORT_S if self._stream is sys.stdout else -1)
        if self._ended == self.total:
            fresh, seconds = self.total - self._known, time.monotonic() - self._began
            parts = [f"{self._known} known"] if self._known else []
            parts += [f"{fresh} made in {_clock(seconds)}"] if fresh else []
            self._line(", ".join(parts))

    def _completed(self) -> float:
        """Items that have ended, and the parts that are done of those that run."""
        return self._ended + sum(self._running.values())

    def _draw(self, note: str) -> None:
        self._bar.update(self._bar.task_ids[0], completed=self._completed(), note=note)

    def _line(self, text: str, pause: float = -1) -> None:
        """Prints a line, unless the last one is not older than `pause` seconds."""
        if self._has_lines and time.monotonic() - self._last_line > pause:
            self._last_line = time.monotonic()
            self._stream.write(f"{self.title}: {text}\n")
            self._stream.flush()

    def _left(self) -> str:
        """`, 3 min left`, estimated from the work done so far. Empty before any work is done."""
        work, ahead = self._completed() - self._given, self.total - self._completed()
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
