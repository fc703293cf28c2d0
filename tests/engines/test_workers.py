"""The sequential engine in several processes: the same bits, and no process is left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fedml_noniid.core.errors import UserError
from fedml_noniid.engines import forks, sequential
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.engines.storage import ALIGNED, rows_for, shared
from fedml_noniid.engines.workers import Workers, portion
from fedml_noniid.models import build
from tests import federation
from tests.processes import alive, until


def simulation(recipe: str, settings: Any = None, workers: int = 3, **options: Any) -> Simulation:
    of = federation.images(torch.float32)
    return federation.simulation(
        recipe,
        settings,
        data=of,
        model=build("cnn", (1, 6, 6), 3, {"channels": 2, "hidden": 4}),
        workers=workers,
        **options,
    )


def processes_of(made: Simulation) -> list[int]:
    assert isinstance(made.engine, Workers) and made.engine._pool is not None
    return [process.pid or 0 for process in made.engine._pool.processes]


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


def test_processes_end_with_the_simulation() -> None:
    made = simulation("fedavg")
    made.run()
    ids = processes_of(made)
    assert len(ids) == 3 and all(alive(pid) for pid in ids)
    del made
    gc.collect()
    assert not any(alive(pid) for pid in ids)


def test_processes_in_the_middle_of_their_work_end_too() -> None:
    """They would not look at their pipe for a minute; those of items side by side end likewise."""
    forks.settle()
    process = os.fork()
    if process == 0:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sequential, "train", lambda *_: time.sleep(60))
            simulation("fedavg").run()
        os._exit(1)
    tasks = Path(f"/proc/{process}/task/{process}/children")
    until(lambda: len(tasks.read_text().split()) == 3)
    ids = [int(word) for word in tasks.read_text().split()]
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    until(lambda: not any(alive(pid) for pid in ids), seconds=10)


def test_a_worker_that_is_killed_ends_the_run_in_a_sentence() -> None:
    made = simulation("fedavg")
    rounds = made.rounds()
    next(rounds)
    os.kill(processes_of(made)[1], signal.SIGKILL)
    with pytest.raises(UserError, match="a worker process ended without an answer"):
        next(rounds)


def test_a_backward_pass_before_the_run_is_no_failure() -> None:
    """On a machine with a GPU (which torch is made to believe), autograd has threads after it, and
    refuses to work in forked processes: the clients then train in this one."""
    code = """
import torch
from tests.engines.test_workers import simulation
torch._C._ensureCUDADeviceGuardSet()
torch.ones((), requires_grad=True).backward()
made = simulation("moon", workers=2, rounds=1)
made.run()
assert type(made.engine).__name__ == "Sequential"
"""
    # A process of its own: torch counts the GPUs in the first backward pass.
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_an_error_in_a_worker_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr("fedml_noniid.engines.sequential.train", fail)  # before the fork
    with pytest.raises(ValueError, match="no such thing") as caught:
        simulation("fedavg").run()
    assert "in a worker process" in caught.value.__notes__[0]


def test_dense_models_and_single_clients_stay_in_one_process() -> None:
    assert not isinstance(
        federation.simulation("fedavg", engine="vectorized", workers=2).engine, Workers
    )
    assert not isinstance(federation.simulation("fedavg", cohort=1, workers=2).engine, Workers)


# shared storage


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
