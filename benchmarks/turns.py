"""Measures two processes against one: `python -m benchmarks.turns RESULT - JOB...`.

Both simulate the job in one measuring process, a round of the one and a round of the other in turns: a machine whose
speed changes from minute to minute hits both alike.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from benchmarks.ours import simulation
from benchmarks.peers.harness import Job, main
from benchmarks.statistics import quartiles


def measure(job: Job, _: str) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Seconds of each round that counts, by engine."""
    engines = {engine: simulation(job, engine) for engine in ("sequential", "workers")}
    running = {engine: simulated.rounds() for engine, simulated in engines.items()}
    seconds: dict[str, list[float]] = {engine: [] for engine in engines}
    for _cohort in job.cohorts:
        for engine, rounds in running.items():
            began = time.perf_counter()
            next(rounds)
            seconds[engine].append(time.perf_counter() - began)
    return {engine: of[job.warm :] for engine, of in seconds.items()}, engines["workers"].outcome.params


def speedup(found: Mapping[str, list[float]]) -> tuple[float, float, float]:
    """How many times as fast two processes are as one: the quartiles over pairs of rounds, the median in the middle."""
    return quartiles([one / two for one, two in zip(found["sequential"], found["workers"], strict=True)])


if __name__ == "__main__":
    main(measure)
