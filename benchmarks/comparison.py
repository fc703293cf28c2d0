"""Part 1: every engine on a workload, in turns, and whether it did the work."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import agreement
from benchmarks.engines import BARE, Engine
from benchmarks.peers.harness import Job, read_job
from benchmarks.processes import FailedError, measure
from benchmarks.statistics import median, ratio
from benchmarks.workloads import Workload, write_job

Log = Callable[[str], None]


def compare(workload: Workload, engines: Sequence[Engine], repetitions: int, folder: Path, log: Log) -> dict[str, Any]:
    """Measures the bare loop and `engines`; their order is rotated, so that a drift of the machine hits all alike."""
    path = folder / f"{workload.name}.npz"
    write_job(workload, path)
    job, everybody = read_job(path), [BARE, *engines]
    runs: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in everybody}
    failed: dict[str, str] = {}
    for repetition in range(repetitions):
        first = repetition % len(everybody)
        weights: dict[str, agreement.Weights] = {}
        for engine in [*everybody[first:], *everybody[:first]]:
            if engine.name in failed:
                continue
            log(f"{workload.name}, {repetition + 1} of {repetitions}: {engine.name}")
            try:
                (found,), weights[engine.name] = measure(engine, [path])
            except FailedError as error:
                if engine is BARE:
                    raise
                failed[engine.name] = str(error)
                log(f"  {error}")
                continue
            runs[engine.name].append(found)
        for engine in everybody:
            if engine.name in weights:
                runs[engine.name][-1] |= _proof(job, weights[BARE.name], weights[engine.name], engine.same_order)
    path.unlink()
    rows = [
        {"engine": engine.name, "problem": failed[engine.name]}
        if engine.name in failed
        else row(workload, engine.name, runs[engine.name], runs[BARE.name])
        for engine in everybody
    ]
    return {"what": workload.what, "steps": workload.steps, "rows": rows}


def _proof(job: Job, bare: agreement.Weights, weights: agreement.Weights, same_order: bool) -> dict[str, Any]:
    problem = agreement.complaint(job, bare, weights, same_order)
    raw = b"".join(weights[key].numpy().tobytes() for key in sorted(weights))
    loss = agreement.loss(job, weights) if weights.keys() >= job.weights.keys() else float("nan")
    return {"problem": problem, "checksum": hashlib.sha256(raw).hexdigest()[:12], "loss": loss}


def row(workload: Workload, name: str, runs: list[dict[str, Any]], bare: list[dict[str, Any]]) -> dict[str, Any]:
    """An engine's medians, over rounds and then over repetitions; rates relative to the bare loop's."""
    wall, cpu, bare_wall, bare_cpu = (
        [median(run[clock]) for run in of] for of in (runs, bare) for clock in ("wall", "cpu")
    )
    return {
        "engine": name,
        "wall_s": median(wall),
        "cpu_s": median(cpu),
        "steps_per_wall_s": workload.steps / median(wall),
        "steps_per_cpu_s": workload.steps / median(cpu),
        "ratio_wall": ratio(bare_wall, wall),
        "ratio_cpu": ratio(bare_cpu, cpu),
        "peak_mb": median([run["peak_mb"] for run in runs]),
        "loss": runs[-1]["loss"],
        "checksum": runs[-1]["checksum"],
        "note": runs[-1]["note"],
        "problem": next((run["problem"] for run in runs if run["problem"]), ""),
        "repetitions": runs,
    }
