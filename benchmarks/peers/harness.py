"""The shared part of every measured process: it reads its job, times its rounds and writes its
result.

A job is a file with the inputs that all engines share: samples, initial weights, cohorts and
batches by round.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.peers import models

TURNS = "BENCHMARK_TURNS"  # variable with two file descriptors: one receives turns, one sends words
READY, DONE = b"?", b"."  # the words: ready for a round, round ended
WEIGHTS = "weights/"  # prefix of the weights' names in a file


@dataclass(frozen=True)
class Job:
    """The work of one measurement."""

    settings: dict[str, Any]  # the fields of a `benchmarks.workloads.Workload`
    x: Tensor  # [n, ...]
    y: Tensor  # [n]
    weights: dict[str, Tensor]  # the initial weights
    cohorts: list[list[int]]  # the clients of each round
    batches: Tensor  # [T, M, S, B], the samples of each step

    def __getattr__(self, name: str) -> Any:
        try:
            return self.settings[name]
        except KeyError:
            raise AttributeError(name) from None

    def module(self) -> nn.Module:
        """The network with the initial weights, in train mode."""
        module = models.build(self.model, self.x.shape[1:], self.hidden)
        module.load_state_dict(
            self.weights, strict=False
        )  # batch norms start with torch's statistics
        return module.train()

    def samples_of(self, client: int) -> slice:
        """The positions of a client's samples."""
        return slice(client * self.per_client, (client + 1) * self.per_client)


def read_job(path: Path) -> Job:
    """The job that `benchmarks.workloads.write_job` wrote."""
    with np.load(path, allow_pickle=False) as file:
        weights = {
            key.removeprefix(WEIGHTS): torch.from_numpy(file[key])
            for key in file
            if key.startswith(WEIGHTS)
        }
        x, y, batches = (torch.from_numpy(file[key]) for key in ("x", "y", "batches"))
        return Job(
            json.loads(str(file["settings"])), x, y, weights, file["cohorts"].tolist(), batches
        )


class Turns:
    """Lets rounds wait for their turn. Without the variable `TURNS` no round waits."""

    def __init__(self) -> None:
        pipes = os.environ.get(TURNS, "")
        self._pipes = [int(word) for word in pipes.split(",")] if pipes else []

    def take(self) -> None:
        """Says that a round is ready, and waits for the turn."""
        if self._pipes:
            os.write(self._pipes[1], READY)
            if not os.read(self._pipes[0], 1):
                raise SystemExit("nobody gives turns any more")

    def give(self) -> None:
        """Says that the round has ended."""
        if self._pipes:
            os.write(self._pipes[1], DONE)


class Meter:
    """Wall time and CPU time of rounds, including child processes."""

    def __init__(self) -> None:
        self._turns = Turns()
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self._began = (0.0, 0.0)

    def begin(self) -> None:
        """Waits for the turn and starts the clock of a round."""
        self._turns.take()
        self._began = time.perf_counter(), cpu_seconds()

    def end(self) -> None:
        """Stops the clock and gives the turn back."""
        wall, cpu = time.perf_counter(), cpu_seconds()
        self.wall.append(wall - self._began[0])
        self.cpu.append(cpu - self._began[1])
        self._turns.give()

    def measured(self, warm: int, note: str = "") -> dict[str, Any]:
        """The times of the rounds after warm-up, and the peak memory."""
        return {
            "wall": self.wall[warm:],
            "cpu": self.cpu[warm:],
            "peak_mb": peak_mb(),
            "note": note,
        }


def version(package: str) -> str:
    """The installed version of a peer, for its row. Raises PackageNotFoundError."""
    return f"{package} {metadata.version(package)}"


def children(process: int | str = "self") -> list[int]:
    """All descendants of a process."""
    pids = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        for child in _text(file).split():
            pids += [int(child), *children(child)]
    return pids


def cpu_seconds() -> float:
    """CPU time of this process and its descendants so far, and of those of them that ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + sum(map(_cpu_of, children()))


def _cpu_of(process: int) -> float:
    """CPU time of another process, by the scheduler's clock, and of its children that ended.

    Without that clock, and of ended children (a fork server's), by ticks of 10 ms.
    """
    clocks = [_text(file).split() for file in Path(f"/proc/{process}/task").glob("*/schedstat")]
    ticks = _text(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()
    counted = sum(map(int, ticks[13 if clocks else 11 : 15])) / os.sysconf("SC_CLK_TCK")
    return counted + sum(int(clock[0]) for clock in clocks if clock) / 1e9


def peak_mb() -> float:
    """The peak memory of this process plus the present private memory of its descendants."""
    process = _kilobytes(Path("/proc/self/status"), "VmHWM:")
    rollups = [Path(f"/proc/{child}/smaps_rollup") for child in children()]
    return (process + sum(_kilobytes(rollup, "Private_") for rollup in rollups)) / 1024


def _kilobytes(file: Path, prefix: str) -> int:
    lines = [line.split() for line in _text(file).splitlines()]
    return sum(int(line[1]) for line in lines if len(line) > 1 and line[0].startswith(prefix))


def _text(file: Path) -> str:
    """The text of a file of /proc. Empty if the process has just ended."""
    try:
        return file.read_text()
    except (OSError, ProcessLookupError):
        return ""


def write_result(path: Path, result: dict[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Writes the numbers and the final weights."""
    arrays = {WEIGHTS + key: leaf.detach().contiguous().numpy() for key, leaf in weights.items()}
    with path.open("wb") as file:
        np.savez(file, result=np.array(json.dumps(result)), **arrays)


def read_result(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Reads the numbers and weights that `write_result` wrote."""
    with np.load(path, allow_pickle=False) as file:
        weights = {
            key.removeprefix(WEIGHTS): torch.from_numpy(file[key])
            for key in file
            if key.startswith(WEIGHTS)
        }
        return json.loads(str(file["result"])), weights


def main(measure: Callable[[Job, str], tuple[dict[str, Any], Mapping[str, Tensor]]]) -> None:
    """`python -m MODULE RESULT ARGUMENT JOB`: measures a job with one thread."""
    result, argument, job = sys.argv[1:]
    torch.set_num_threads(1)
    write_result(Path(result), *measure(read_job(Path(job)), argument))
