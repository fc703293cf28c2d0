"""Part 1: measures every engine on a workload, in turns with the others, and checks that it did the
work."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import agreement
from benchmarks.engines import BARE, Engine
from benchmarks.peers.harness import Job, read_job
from benchmarks.processes import FailedError, in_turns
from benchmarks.statistics import ratio
from benchmarks.workloads import Workload, write_job

Log = Callable[[str], None]

TOGETHER = 4  # engines per group beside the bare loop; a whole group is in memory at once


def compare(
    workload: Workload, engines: Sequence[Engine], repetitions: int, folder: Path, log: Log
) -> dict[str, Any]:
    """Measures the bare loop and `engines` in turns of a few rounds, so a slow minute of the
    machine hits all alike."""
    path = folder / f"{workload.name}.npz"
    write_job(workload, path)
    job = read_job(path)
    runs: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in [BARE, *engines]}
    failed: dict[str, str] = {}
    for repetition in range(repetitions):
        for first in range(0, len(engines), TOGETHER):
            group = [
                BARE,
                *(
                    engine
                    for engine in engines[first : first + TOGETHER]
                    if engine.name not in failed
                ),
            ]
            names = ", ".join(engine.name for engine in group)
            log(f"{workload.name}, {repetition + 1} of {repetitions}, in turns: {names}")
            outcomes = in_turns([(engine, path) for engine in group], workload.at_once)
            limit = outcomes[0]
            if isinstance(limit, FailedError):
                raise limit
            base, expected = limit
            for engine, outcome in zip(group, outcomes, strict=True):
                if isinstance(outcome, FailedError):
                    failed[engine.name] = str(outcome)
                    log(f"  {engine.name}: {outcome}")
                    continue
                numbers, weights = outcome
                beside = {"bare_wall": base["wall"], "bare_cpu": base["cpu"]}
                runs[engine.name].append(
                    numbers | beside | _proof(job, expected, weights, engine.same_order)
                )
    path.unlink()
    rows = [
        {"engine": name, "problem": failed[name]}
        if name in failed
        else row(workload, name, own_runs)
        for name, own_runs in runs.items()
    ]
    return {"what": workload.what, "steps": workload.steps, "rows": rows}


def _proof(
    job: Job, bare: agreement.Weights, weights: agreement.Weights, same_order: bool
) -> dict[str, Any]:
    problem = agreement.complaint(job, bare, weights, same_order)
    raw = b"".join(weights[key].numpy().tobytes() for key in sorted(weights))
    loss = agreement.loss(job, weights) if weights.keys() >= job.weights.keys() else float("nan")
    return {"problem": problem, "checksum": hashlib.sha256(raw).hexdigest()[:12], "loss": loss}


def row(workload: Workload, name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """An engine's medians over all rounds.

    Ratios compare each round with the neighbouring round of the bare loop.
    """
    wall, cpu, bare_wall, bare_cpu = (
        [value for run in runs for value in run[clock]]
        for clock in ("wall", "cpu", "bare_wall", "bare_cpu")
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
