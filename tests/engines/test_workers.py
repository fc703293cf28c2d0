"""The sequential engine in several processes: the same bits, and no process is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.core.component import Ask
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.core.trees import Tree
from fedml_noniid.plugins.engines.packing import flatten
from fedml_noniid.plugins.engines.sequential import Sequential
from fedml_noniid.plugins.engines.simulation import Simulation
from fedml_noniid.plugins.engines.storage import ALIGNED, SharedStorage, rows_for, shared
from fedml_noniid.plugins.engines.workers import Workers, portion
from fedml_noniid.plugins.models import build
from tests import federation
from tests.processes import alive

CNN = {"channels": 2, "hidden": 4}


def simulation(recipe: str, settings: Any = None, workers: int = 3, **options: Any) -> Simulation:
    of = federation.images(torch.float32)
    made = federation.simulation(
        recipe, settings, of=of, model=build("cnn", (1, 6, 6), 3, CNN), workers=workers, **options
    )
    assert isinstance(made.engine, Workers) is (workers > 1)
    return made


# Memories; what is held through a round; asks before the first round and after the last; what the
# server trains.
RECIPES = ["fedavg", "scaffold+fnr", "rfedavg_plus", "moon+fednlr", "feddyn", "ccvr", "fedgen"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_bits_as_in_one_process(recipe: str) -> None:
    assert federation.equal(simulation(recipe).run(), simulation(recipe, workers=1).run())


@pytest.mark.parametrize(
    ("sizes", "processes", "taken"),
    [
        ([1] * 20, 2, 5),  # a quarter of what is left
        ([1] * 6, 2, 2),  # 6 / 4, rounded up
        ([3], 4, 1),
        ([10, 1, 1, 1, 1], 2, 1),  # one that has most is enough
        ([], 2, 0),
    ],
)
def test_pieces_by_hand(sizes: list[int], processes: int, taken: int) -> None:
    assert portion(sizes, processes) == taken


def test_a_process_that_is_slow_gets_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first to be started sleeps over each client, while the others take what is left; the bits
    stay the same."""
    alone, front = simulation("scaffold", workers=1, cohort=5, rounds=1).run(), os.getpid()
    made = simulation("scaffold", workers=2, cohort=5, rounds=1)
    some = Sequential.some

    def slow(self: Sequential, ask: Ask, round_: int, positions: Sequence[int]) -> Tree:
        assert os.getpid() != front and isinstance(made.engine, Workers)
        if not made.engine._workers:  # as the first sees it, which was forked before it was noted
            time.sleep(2)
        return some(self, ask, round_, positions)

    monkeypatch.setattr(Sequential, "some", slow)
    assert federation.equal(made.run(), alone)
    assert isinstance(made.engine, Workers)
    sizes = sorted(map(len, made.engine.clients.indices.values()), reverse=True)
    first = portion(sizes, 2)
    assert sorted(made.engine._home.values()) == [0] * first + [1] * (
        5 - first
    )  # nothing but its first piece


@pytest.mark.parametrize("workers", [2, 4, 9])
def test_any_number_of_processes(workers: int) -> None:
    """Nine are no more than the four of the cohort."""
    made = simulation("scaffold", workers=workers)
    assert isinstance(made.engine, Workers) and made.engine.processes == min(workers, 4)
    assert federation.equal(made.run(), simulation("scaffold", workers=1).run())


def test_a_run_that_is_resumed_has_the_same_bits(tmp_path: Path) -> None:
    """Memories come from the checkpoint."""
    path = tmp_path / "checkpoint.safetensors"
    simulation("scaffold", rounds=2, checkpoint=path).run()
    again = simulation("scaffold", rounds=4, checkpoint=path)
    assert again.start_round == 2
    assert federation.equal_models(again.run(), simulation("scaffold", rounds=4, workers=1).run())


def test_processes_end_with_the_simulation() -> None:
    made = simulation("fedavg")
    made.run()
    assert isinstance(made.engine, Workers)
    ids = [worker.process.pid or 0 for worker in made.engine._workers]
    assert len(ids) == 3 and all(alive(pid) for pid in ids)
    del made
    gc.collect()
    assert not any(alive(pid) for pid in ids)


def test_processes_end_with_a_process_that_is_killed() -> None:
    code = """
import time
from tests.engines.test_workers import simulation
made = simulation("fedavg")
made.run()
print(*[worker.process.pid for worker in made.engine._workers], flush=True)
time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        ids = [int(word) for word in process.stdout.readline().split()]
        assert len(ids) == 3 and all(alive(pid) for pid in ids)
        process.kill()
    end = time.monotonic() + 10
    while any(alive(pid) for pid in ids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in ids)


def test_processes_in_the_middle_of_their_work_end_too() -> None:
    """They would not look at their pipe for a minute."""
    code = """
import time
from fedml_noniid.plugins.engines import sequential
from tests.engines.test_workers import simulation
sequential.train = lambda *_: time.sleep(60)
simulation("fedavg").run()
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        tasks, end = Path(f"/proc/{process.pid}/task/{process.pid}/children"), time.monotonic() + 60
        while (
            len(ids := [int(word) for word in tasks.read_text().split()]) < 3
            and time.monotonic() < end
        ):
            time.sleep(0.05)
        assert len(ids) == 3
        process.kill()
    end = time.monotonic() + 10
    while any(alive(pid) for pid in ids) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in ids)


def test_a_worker_that_is_killed_ends_the_run_in_a_sentence() -> None:
    made = simulation("fedavg")
    rounds = made.rounds()
    next(rounds)
    assert isinstance(made.engine, Workers)
    pid = made.engine._workers[1].process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(UserError, match="a worker process ended without an answer"):
        next(rounds)


@pytest.mark.parametrize("gpu", [False, True])
def test_a_backward_pass_before_the_run_changes_no_bit(gpu: bool) -> None:
    """On a machine with a GPU (which torch is made to believe), autograd has threads after it, and
    refuses to work in forked processes: the clients then train in this one."""
    code = f"""
import torch
from tests import federation
from tests.engines.test_workers import simulation
if {gpu}:
    torch._C._ensureCUDADeviceGuardSet()
torch.ones((), requires_grad=True).backward()
made = simulation("moon", workers=2, rounds=1)
assert federation.equal(made.run(), simulation("moon", workers=1, rounds=1).run())
assert bool(made.engine._workers) is not {gpu}
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_an_error_in_a_worker_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr("fedml_noniid.plugins.engines.sequential.train", fail)  # before the fork
    with pytest.raises(ValueError, match="no such thing") as caught:
        simulation("fedavg").run()
    assert "in a worker process" in caught.value.__notes__[0]


def test_dense_models_and_single_clients_stay_in_one_process() -> None:
    assert not isinstance(
        federation.simulation("fedavg", engine="vectorized", workers=2).engine, Workers
    )
    assert not isinstance(federation.simulation("fedavg", cohort=1, workers=2).engine, Workers)


# shared storage

TREE: Tree = {
    "a": torch.arange(5, dtype=torch.float64),
    "deep": {
        "b": torch.tensor([[True], [False]]),
        "c": torch.ones((), dtype=torch.int64),
        "none": torch.empty(0, 3),
    },
    "view": torch.arange(12.0).reshape(3, 4).t(),
}


def same(found: Tree, wanted: Tree) -> bool:
    a, b = flatten(found), flatten(wanted)
    return a.keys() == b.keys() and all(
        torch.equal(a[key], b[key]) and a[key].dtype == b[key].dtype for key in b
    )


def test_a_storage_gives_back_what_was_put_in() -> None:
    storage = SharedStorage(10 * ALIGNED)
    places = storage.put(TREE)
    assert same(storage.get(places), TREE)
    assert storage.get(places)["view"].data_ptr() % ALIGNED == 0
    storage.clear()
    again = storage.put({"x": torch.zeros(5, dtype=torch.float64)})
    assert torch.equal(storage.get(places)["a"], storage.get(again)["x"]), (
        "the place of the first leaf"
    )


@pytest.mark.parametrize("memory", [None, shared], ids=["private", "shared"])
def test_each_row_of_models_lies_as_a_tensor_of_its_own_would(memory: Any) -> None:
    like = {
        "odd": torch.zeros(3, 5),
        "one": torch.zeros((), dtype=torch.float64),
        "even": torch.zeros(4, 16),
    }
    rows = rows_for(like, 3, memory)
    for key, leaf in like.items():
        assert rows[key].shape == (3, *leaf.shape) and rows[key].dtype == leaf.dtype
        for k, row in enumerate(rows[key]):
            assert row.data_ptr() % ALIGNED == 0 and row.is_contiguous()
            row.fill_(k)
    for leaf in rows.values():
        assert [row.flatten().tolist() for row in leaf] == [
            [float(k)] * leaf[0].numel() for k in range(3)
        ]


def test_what_does_not_fit_travels_by_itself() -> None:
    storage = SharedStorage(ALIGNED)
    places = storage.put(TREE)
    assert same(storage.get(places), TREE)
    assert isinstance(places["view"], np.ndarray)
