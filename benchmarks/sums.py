"""What exact sums cost: rounds with them and with a float32 average, in turns in one process.

The other side of the comparison, torch's product of a matrix and a vector, is not in the package.
"""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks import machine
from benchmarks.ours import simulation
from benchmarks.peers.harness import read_job
from benchmarks.report import render
from benchmarks.statistics import quartiles
from benchmarks.workloads import WORKLOADS, write_job
from fedml_noniid.core import algorithm
from fedml_noniid.core.sums import weighted_mean
from fedml_noniid.core.trees import Tree, tree_map
from fedml_noniid.data.files import write_whole
from fedml_noniid.engines.simulation import Simulation

FILE = Path("docs/results/sums.csv")
PAIRS = {"mlp": 300, "cifar_cnn": 20, "mnist_cnn": 8, "resnet18": 6}
ENGINES = {"mlp": "vectorized"}  # the others: sequential
WARM = 2  # rounds
CLIENTS = 100  # of ResNet-18, for the memory
COLUMNS = ["workload", "engine", "pairs", "float32_s", "exact_s", "ratio", "ratio_25", "ratio_75"]


def in_float32(weights: Tensor, stacked: Tree) -> Tree:
    """The weighted mean as sums of float32 in client order."""
    p = weights / weights.sum()

    def mean(leaf: Tensor) -> Tensor:
        rows = leaf.reshape(len(leaf), -1)
        return torch.mv(rows.t(), p.to(leaf.dtype)).reshape(leaf.shape[1:])

    return tree_map(mean, stacked)


def seconds(rounds: Any, mean: Callable[..., Tree]) -> float:
    """The time of the next round with this mean."""
    with patch.object(algorithm, "weighted_mean", mean):
        began = time.perf_counter()
        next(rounds)
        return time.perf_counter() - began


def made(name: str, pairs: int) -> Simulation:
    """The simulation of a workload, with as many rounds as are measured."""
    workload = replace(WORKLOADS[name], warm=WARM, rounds=2 * pairs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.npz"
        write_job(workload, path)
        return simulation(read_job(path), ENGINES.get(name, "sequential"))


def measured(name: str, pairs: int) -> dict[str, object]:
    """The line of a workload."""
    rounds = made(name, pairs).rounds()
    for _ in range(WARM):
        next(rounds)
    plain: list[float] = []
    exact: list[float] = []
    for pair in range(pairs):
        turns = [(plain, in_float32), (exact, weighted_mean)]
        for times, mean in turns if pair % 2 else turns[::-1]:
            times.append(seconds(rounds, mean))
    ratios = quartiles([b / a for a, b in zip(plain, exact, strict=True)])
    medians = quartiles(plain)[1], quartiles(exact)[1]
    numbers = [*medians, ratios[1], ratios[0], ratios[2]]
    engine = ENGINES.get(name, "sequential")
    return dict(zip(COLUMNS, [name, engine, pairs, *(f"{n:.4g}" for n in numbers)], strict=True))


def peak() -> str:
    """MB at most in a process that runs a round of `CLIENTS` clients with ResNet-18."""
    code = f"from benchmarks import sums; sums.one_round({CLIENTS})"
    made = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return made.stdout.strip()


def one_round(clients: int) -> None:
    """Prints the memory of the round, in a process of its own."""
    workload = replace(
        WORKLOADS["resnet18"], clients=clients, cohort=clients, per_client=1, batch=1, rounds=1
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "job.npz"
        write_job(workload, path)
        simulated = simulation(read_job(path), "sequential")
    next(simulated.rounds())
    # Not `ru_maxrss`: that of the process which started this one counts in it.
    status = Path("/proc/self/status").read_text()
    (kib,) = re.findall(r"VmHWM:\s+(\d+)", status)
    sys.stdout.write(str(int(kib) >> 10))


def write(root: Path) -> None:
    """Measures, and writes the table and the page."""
    torch.set_num_threads(1)
    watch = machine.Watch()
    rows = [measured(name, pairs) for name, pairs in PAIRS.items()]
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    context = {
        "rows": [row | {"what": WORKLOADS[str(row["workload"])].what} for row in rows],
        "peak": peak(),
        "clients": CLIENTS,
        "held": round(CLIENTS * 11_173_962 * 4 / 2**20),
        "machine": machine.line(watch.found()),
    }
    write_whole(root / FILE, text.getvalue())
    write_whole(root / FILE.with_suffix(".md"), render("sums.md.j2", context))
