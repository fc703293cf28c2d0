"""Part 2: seconds per round by cohort, number of clients, width and workers, and the fraction of a
round outside the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.comparison import Log
from benchmarks.engines import Engine, ours
from benchmarks.processes import FailedError, in_turns, measure
from benchmarks.workloads import WORKLOADS, Workload, write_job

MLP = replace(WORKLOADS["mlp"], at_once=5)
SWEEPS = {  # name -> its workloads, from small to large
    "cohort": [replace(MLP, clients=300, cohort=size) for size in (10, 30, 100, 300)],
    # 20 samples per client keep the data of 10,000 clients at 50 MB.
    "clients": [replace(MLP, clients=total, per_client=20) for total in (100, 1000, 10000)],
    "hidden": [replace(MLP, hidden=width) for width in (16, 64, 256, 1024)],
}
WORKERS = (1, 2, 4)  # processes that divide a round of the sequential engine
# A model of a million parameters: of a small one, a round is over before workers are of use.
LARGE = replace(
    WORKLOADS["mlp"], clients=16, cohort=16, per_client=100, hidden=13_600, rounds=8, at_once=1
)
SPLIT = ("mlp", "cifar_cnn")  # workloads whose fraction outside the steps is measured


def sweep(engines: Sequence[Engine], quick: bool, folder: Path, log: Log) -> dict[str, Any]:
    """Seconds per round and peak memory at each point of each sweep.

    The points of a sweep take turns.
    """
    taken = {
        name: [p.quick() for p in points[:1]] if quick else points
        for name, points in SWEEPS.items()
    }
    found: dict[str, Any] = {
        name: {"values": [getattr(point, name) for point in points], "engines": {}}
        for name, points in taken.items()
    }
    for name, points in taken.items():
        paths = _written(points, folder)
        for engine in engines:
            log(f"scaling, {name}, in turns: {engine.name}")
            found_at = []
            for outcome in in_turns([(engine, path) for path in paths], MLP.at_once):
                if isinstance(outcome, FailedError):
                    raise outcome
                found_at.append(outcome[0])
            found[name]["engines"][engine.name] = {
                "wall_s": [median(one["wall"]) for one in found_at],
                "peak_mb": [one["peak_mb"] for one in found_at],
            }
        for path in paths:
            path.unlink()
    found["workers"] = workers(quick, folder, log)
    return found


def workers(quick: bool, folder: Path, log: Log) -> dict[str, Any]:
    """Seconds per round of a large model by the number of processes, in turns."""
    numbers = WORKERS[:1] if quick else WORKERS
    (path,) = _written([LARGE.quick() if quick else LARGE], folder)
    log("scaling, workers, in turns")
    engines = [replace(ours(LARGE)[-1], argument=f"workers:{number}") for number in numbers]
    rows = []
    for outcome in in_turns([(engine, path) for engine in engines], LARGE.at_once):
        if isinstance(outcome, FailedError):
            raise outcome
        rows.append(outcome[0])
    path.unlink()
    walls, peaks = [median(one["wall"]) for one in rows], [one["peak_mb"] for one in rows]
    by = {"ours, sequential": {"wall_s": walls, "peak_mb": peaks}}
    return {"values": [*numbers], "engines": by}


def overhead(workload: Workload, quick: bool, folder: Path, log: Log) -> dict[str, list[float]]:
    """For each of our one-process engines, the fraction of each round outside the steps."""
    (path,) = _written([workload], folder)
    found = {}
    for engine in ours(workload)[1 if quick else 0 :]:
        if not engine.parallel:
            log(f"{workload.name}, outside the steps: {engine.name}")
            one, _ = measure(replace(engine, module="benchmarks.overhead"), path)
            found[engine.name] = one["share"]
    path.unlink()
    return found


def swept() -> list[Engine]:
    """The engines of the sweeps."""
    return [engine for engine in ours(MLP) if not engine.parallel]


def _written(workloads: Sequence[Workload], folder: Path) -> list[Path]:
    paths = [folder / f"{number}.npz" for number in range(len(workloads))]
    for workload, path in zip(workloads, paths, strict=True):
        write_job(workload, path)
    return paths
