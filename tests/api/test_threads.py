"""Runs in several threads of one process: each has the weights that it has alone, and torch's
settings stay."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import fedml_noniid as nd
from fedml_noniid.api import running

SPLIT = nd.partition(nd.load("digits"), "dirichlet", clients=5, alpha=0.5, public=50)
SEEDS = [0, 1]


def run(recipe: str, **given: Any) -> dict[int, str]:
    return nd.run(recipe, SPLIT, seeds=SEEDS, rounds=2, epochs=1, progress=False, **given).sha256


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What the calls return, each in a thread of its own. All begin at the same time."""
    gate = threading.Barrier(len(calls), timeout=60)

    def begin(call: Callable[[], Any]) -> Any:
        gate.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return list(threads.map(begin, calls))


def settings() -> tuple[int, bool, bool]:
    backends = torch.backends
    return torch.get_num_threads(), backends.cuda.matmul.allow_tf32, backends.cudnn.allow_tf32


def test_each_run_has_the_weights_that_it_has_alone() -> None:
    """In one process, and in two."""
    hows = [("fedavg", 1), ("scaffold", 2), ("scaffold", 1)]
    alone = {recipe: run(recipe) for recipe, _ in hows}
    assert alone["fedavg"] != alone["scaffold"]
    found = at_once(*(lambda how=how: run(how[0], processes=how[1]) for how in hows))
    assert found == [alone[recipe] for recipe, _ in hows]


def test_a_run_has_its_own_threads_and_leaves_those_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Runs that want other numbers of threads, in threads that torch counts one by one. `late` uses
    torch during a run of another thread, and so has the number of that run for itself."""
    seen, measure, inside = [], running.measure, threading.Event()

    def noted(item: Any, *given: Any) -> Any:
        seen.append((item.settings.train.threads, torch.get_num_threads()))
        inside.set()
        return measure(item, *given)

    def late() -> None:
        assert inside.wait(60)
        torch.get_num_threads()
        run("fedavg", threads=2)

    monkeypatch.setattr(running, "measure", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    torch.backends.cudnn.allow_tf32 = True
    try:
        at_once(*(lambda n=n: run("fedavg", threads=n) for n in (1, 2, 1)), late)
        assert len(seen) == 8 and all(wanted == found for wanted, found in seen)
        assert [settings(), *at_once(settings)] == [(3, False, True)] * 2
    finally:
        torch.set_num_threads(before)
        torch.backends.cudnn.allow_tf32 = False


def test_a_process_that_is_forked_during_a_run_can_run() -> None:
    """A run of the parent is not under way in the child."""
    inside, over = threading.Event(), threading.Event()

    def hold() -> None:
        with running.in_turn():
            inside.set()
            over.wait(90)

    holder = threading.Thread(target=hold)
    holder.start()
    assert inside.wait(60)
    child = multiprocessing.get_context("fork").Process(target=run, args=["fedavg"])
    child.start()
    child.join(60)
    over.set()
    holder.join()
    child.kill()
    assert child.exitcode == 0
