"""Work side by side: everything once, errors as they are, and no process that outlives its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelines import workers
from plugins.core.errors import NonFiniteError, UserError
from tests.processes import alive

ROOT = Path(__file__).parents[2]


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def fail(number: int) -> int:
    if number == 3:
        raise NonFiniteError("round 2, client 1: not finite")
    return number


@pytest.mark.parametrize("processes", [1, 2])
def test_every_item_once(processes: int) -> None:
    found = dict(workers.side_by_side(square, list(range(9)), processes))
    assert {item: value for item, (value, _) in found.items()} == {n: n * n for n in range(9)}
    where = {process for _, process in found.values()}
    assert where == {os.getpid()} if processes == 1 else os.getpid() not in where


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_comes_as_it_is(processes: int) -> None:
    with pytest.raises(NonFiniteError, match="round 2, client 1: not finite"):
        list(workers.side_by_side(fail, list(range(6)), processes))


def test_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(workers.VARIABLE, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    assert [workers.how_many(threads, False) for threads in (1, 2, 4, 12)] == [6, 3, 1, 1]
    assert workers.how_many(1, True) == 1
    monkeypatch.setenv(workers.VARIABLE, "3")
    assert workers.how_many(4, True) == 3
    for bad in ("0", "two", "-1", "1.5"):
        monkeypatch.setenv(workers.VARIABLE, bad)
        with pytest.raises(UserError, match="whole number from 1 up"):
            workers.how_many(1, False)


SLEEPING = """
import os, time
from pipelines.workers import side_by_side

def sleep(_):
    os.write(1, f"{os.getpid()}\\n".encode())  # in one piece: the other one writes as well
    time.sleep(600)

list(side_by_side(sleep, [0, 1], 2))
"""


def test_a_killed_parent_leaves_nobody_behind() -> None:
    parent = subprocess.Popen([sys.executable, "-c", SLEEPING], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [int(parent.stdout.readline()) for _ in range(2)]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    for _ in range(100):
        if not any(alive(child) for child in children):
            break
        time.sleep(0.1)
    assert not any(alive(child) for child in children)
    parent.stdout.close()


def cores(_: int) -> str:
    return os.environ[workers.VARIABLE]


def test_work_side_by_side_takes_no_processes_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(workers.VARIABLE, "3")
    assert [found for _, found in workers.side_by_side(cores, [1, 2], 2)] == ["1", "1"]
    assert os.environ[workers.VARIABLE] == "3"
