"""Work side by side: everything once, errors as they are, and no process that outlives its
parent."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedml_noniid.core.errors import NonFiniteError
from fedml_noniid.pipelines.experiment import progress, workers

INHERITED: list[str] = []  # a forked process has what the test puts here


def card(folder: Path) -> tuple[str | None, int, list[str]]:
    """Waits until two processes are at work."""
    (folder / str(os.getpid())).touch()
    while len(list(folder.parent.glob("*/*"))) < 2:
        time.sleep(0.01)
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.getpid(), INHERITED


def fail(number: int) -> int:
    if number == 3:
        raise NonFiniteError("round 2, client 1: not finite")
    time.sleep(0.1 * (number > 3))
    return number


@pytest.fixture
def display() -> Iterator[progress.Display]:
    with progress.Display("work", 9) as shown:
        yield shown


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_processes_on_gpus_are_spawned_and_take_them_in_turn(
    display: progress.Display, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(workers, "cards", lambda processes: ["5", "GPU-7"][:processes])
    monkeypatch.setitem(globals(), "INHERITED", ["of the parent"])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    items = [tmp_path / str(number) for number in range(3)]
    for item in items:
        item.mkdir()
    found = [value for _, value in workers.side_by_side(card, items, 2, display, True)]
    seats = {process: str(card) for card, process, _ in found}
    assert sorted(seats.values()) == ["5", "GPU-7"] and os.getpid() not in seats
    assert all(inherited == [] for _, _, inherited in found)
    assert "CUDA_VISIBLE_DEVICES" not in os.environ


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_comes_as_it_is(processes: int, display: progress.Display) -> None:
    """What runs beside it is finished, and nothing else begins."""
    ended: list[int] = []
    results = workers.side_by_side(fail, list(range(30)), processes, display)
    with pytest.raises(NonFiniteError, match="round 2, client 1: not finite"):
        ended.extend(number for number, _ in results)
    assert {*ended} >= {0, 1, 2} and 29 not in ended


def test_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert [workers.how_many(None, threads, 0) for threads in (1, 2, 4, 12)] == [6, 3, 1, 1]
    assert [workers.how_many(None, 1, cards) for cards in (1, 2)] == [1, 2]
    assert workers.how_many(3, 4, 0) == workers.how_many(3, 1, 2) == 3


def tell(number: int) -> int:
    progress.report(progress.RoundReport(f"item {number}", 1, 2, number / 10))
    return os.getpid()


@pytest.mark.parametrize("processes", [1, 2])
def test_every_item_is_worked_on_once_and_one_display_hears_of_all_rounds(
    processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[progress.RoundReport] = []
    monkeypatch.setattr(progress.Display, "show", lambda _, said: heard.append(said))
    with progress.Display("work", 4) as display:
        where = {
            process for _, process in workers.side_by_side(tell, list(range(4)), processes, display)
        }
    assert sorted(heard) == [(f"item {n}", 1, 2, n / 10, "accuracy") for n in range(4)]
    assert (os.getpid() in where) == (processes == 1)
    progress.report(heard[0])
    assert len(heard) == 4, "nobody listens afterwards"
