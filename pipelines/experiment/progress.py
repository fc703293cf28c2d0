"""One progress display for all items and processes of a stage, with the time left.

On a terminal and in a notebook it is one bar for the stage and one for each running item. Elsewhere
it prints a plain line now and then.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from typing import Any, NamedTuple

SHORT_S, EVERY_S = 2, 30  # seconds between two plain lines: about ended items, about running items
PAGE_S = 0.2  # seconds between two pictures of the bars in a notebook


class RoundReport(NamedTuple):
    """An item's report after a round."""

    item: str
    done: int
    rounds: int
    accuracy: float


_receive: Callable[[RoundReport], None] | None = None  # receives the rounds of this process


def report(report: RoundReport) -> None:
    """Reports a round of an item. Every training process calls it after each round."""
    if _receive is not None:
        _receive(report)


def report_to(receive: Callable[[RoundReport], None] | None) -> None:
    """Sets the function that receives the rounds of this process."""
    global _receive
    _receive = receive


class Display:
    """Shows the progress of `total` items. A context manager; call `done` when an item ends.

    `bars`: whether it may show bars. `lines`: whether it prints lines.
    """

    def __init__(self, title: str, total: int, bars: bool = True, lines: bool = True) -> None:
        self.title, self.total = title, total
        self._may_have_bars, self._has_lines = bars, lines
        self._ended, self._known = 0, 0  # number of ended items; of those, taken from the store
        self._work = 0.0  # in items
        self._at_work: dict[
            str, tuple[RoundReport, float]
        ] = {}  # item -> its last round, fraction done before the first
        self._began = self._last_line = time.monotonic()
        self._lock = threading.Lock()
        self._bars: Any = None
        self._bar: dict[str, Any] = {}
        self._page: Any = None  # where a notebook shows the bars
        self._shown = 0.0  # when it showed them

    def __enter__(self) -> Display:
        notebook = self._may_have_bars and _is_notebook()
        if notebook or (self._may_have_bars and sys.stderr.isatty()):
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._bars = Progress(*columns, console=Console(stderr=True))
            self._bar[""] = self._bars.add_task(self.title, total=self.total, note="")
            if notebook:
                from IPython.display import display

                self._page = display(self._bars, display_id=True)  # type: ignore[no-untyped-call]  # of IPython
            else:
                self._bars.start()
        report_to(self.show)
        return self

    def __exit__(self, *_: object) -> None:
        report_to(None)
        if self._page is not None:
            self._show(now=True)
        elif self._bars is not None:
            self._bars.stop()

    def follow(self, queue: SimpleQueue[RoundReport | None]) -> threading.Thread:
        """Reads the reports of other processes until None comes."""

        def read() -> None:
            while (report := queue.get()) is not None:
                self.show(report)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        return thread

    def show(self, report: RoundReport) -> None:
        """A running item has ended a round."""
        with self._lock:
            fraction = report.done / report.rounds
            first = (
                self._at_work[report.item][1]
                if report.item in self._at_work
                else (report.done - 1) / report.rounds
            )
            self._at_work[report.item] = report, first
            if self._bars is not None:
                if report.item not in self._bar:
                    self._bar[report.item] = self._bars.add_task(
                        f"  {report.item}", total=report.rounds, note=""
                    )
                self._bars.update(
                    self._bar[report.item],
                    completed=report.done,
                    note=f"accuracy {report.accuracy:.4f}",
                )
                self._bars.update(self._bar[""], note=self._left().lstrip(", "))
                self._show()
            elif time.monotonic() - self._last_line > EVERY_S and fraction < 1:
                where = (
                    f"{report.item} in round {report.done} of {report.rounds}, accuracy "
                    f"{report.accuracy:.4f}"
                )
                self._line(f"{self._ended} of {self.total} done; {where}{self._left()}")

    def done(self, item: str, outcome: str, known: bool) -> None:
        """An item has ended. `known`: whether it was taken from the store."""
        with self._lock:
            first = self._at_work.pop(item)[1] if item in self._at_work else 0.0
            self._ended, self._known = self._ended + 1, self._known + known
            self._work += 0 if known else 1 - first
            if self._bars is not None:
                self._bars.update(
                    self._bar[""], completed=self._ended, note=self._left().lstrip(", ")
                )
                if item in self._bar:
                    self._bars.remove_task(self._bar.pop(item))
                self._show()
            elif not known and time.monotonic() - self._last_line > SHORT_S:
                self._line(f"{self._ended} of {self.total}: {item} {outcome}{self._left()}")
            if self._ended == self.total:
                self._end()

    def _end(self) -> None:
        fresh, seconds = self.total - self._known, time.monotonic() - self._began
        known = f"{self._known} known" if self._known else ""
        made = f"{fresh} made in {_clock(seconds)}" if fresh else ""
        self._line(", ".join(filter(None, (known, made))))

    def _show(self, now: bool = False) -> None:
        """Shows the bars as they are, in a notebook; a terminal does so by itself."""
        if self._page is not None and (now or time.monotonic() - self._shown > PAGE_S):
            self._shown = time.monotonic()
            self._page.update(self._bars)

    def _line(self, text: str) -> None:
        if not self._has_lines:
            return
        self._last_line = time.monotonic()
        sys.stdout.write(f"{self.title}: {text}\n")
        sys.stdout.flush()

    def _left(self) -> str:
        """`, 3 min left`, estimated from the work done so far. Empty before any work is done."""
        work = self._work + sum(
            report.done / report.rounds - first for report, first in self._at_work.values()
        )
        ahead = (
            self.total
            - self._ended
            - sum(report.done / report.rounds for report, _ in self._at_work.values())
        )
        return (
            f", {_clock((time.monotonic() - self._began) / work * ahead)} left"
            if work > 0 and ahead > 0
            else ""
        )


def _is_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return hasattr(shell, "kernel")


def _clock(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )
