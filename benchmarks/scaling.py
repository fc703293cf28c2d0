"""Part 2: seconds per round by cohort, clients in total and width, and the share of a round outside the steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.comparison import Log
from benchmarks.engines import Engine, ours
from benchmarks.processes import measure
from benchmarks.statistics import median, outside
from benchmarks.workloads import WORKLOADS, Workload, write_job

MLP = replace(WORKLOADS["mlp"], warm=1, rounds=5)
SWEEPS = {  # name -> its workloads, from small to large
    "cohort": [replace(MLP, clients=300, cohort=size) for size in (10, 30, 100, 300)],
    # 20 samples each, so that ten thousand clients' data are 50 MB.
    "clients": [replace(MLP, clients=total, per_client=20) for total in (100, 1000, 10000)],
    "hidden": [replace(MLP, hidden=width) for width in (16, 64, 256, 1024)],
}
SPLIT = ("mlp", "cifar_cnn")  # workloads of which the share outside the steps is measured


def sweep(engines: Sequence[Engine], quick: bool, folder: Path, log: Log) -> dict[str, Any]:
    """Seconds per round, and peak memory, at each point of each sweep; an engine does all of them in one process."""
    taken = {name: [p.quick() for p in points[:2]] if quick else points for name, points in SWEEPS.items()}
    paths = _written([point for points in taken.values() for point in points], folder)
    found: dict[str, Any] = {
        name: {"values": [getattr(point, name) for point in points], "engines": {}} for name, points in taken.items()
    }
    for engine in engines:
        log(f"scaling: {engine.name}")
        results = iter(measure(engine, paths)[0])
        for name, points in taken.items():
            own = [next(results) for _ in points]
            found[name]["engines"][engine.name] = {
                "wall_s": [median(one["wall"]) for one in own],
                "peak_mb": [one["peak_mb"] for one in own],
            }
    for path in paths:
        path.unlink()
    return found


def overhead(workload: Workload, engines: Sequence[Engine], repetitions: int, folder: Path, log: Log) -> dict[str, Any]:
    """Of each engine the share of a round outside the steps, from runs with E and with 2E epochs in turns."""
    paths = _written([workload, replace(workload, epochs=2 * workload.epochs)], folder)
    found = {}
    for engine in engines:
        log(f"{workload.name}, outside the steps: {engine.name}")
        results, _ = measure(engine, paths * repetitions)
        seconds = [median(one["wall"]) for one in results]
        once, twice = seconds[::2], seconds[1::2]
        shares = [outside(*pair) for pair in zip(once, twice, strict=True)]
        found[engine.name] = {"share": median(shares), "once_s": once, "twice_s": twice}
    for path in paths:
        path.unlink()
    return found


def swept() -> list[Engine]:
    """The engines whose scaling is shown."""
    return [engine for engine in ours(MLP) if engine.argument != "workers"]


def _written(workloads: Sequence[Workload], folder: Path) -> list[Path]:
    paths = [folder / f"{number}.npz" for number in range(len(workloads))]
    for workload, path in zip(workloads, paths, strict=True):
        write_job(workload, path)
    return paths
