"""Measures the fraction of our rounds outside the steps: `python -m benchmarks.overhead RESULT
ENGINE JOB`.

The steps are local training itself: reading a batch, its gradient, the update.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

from torch import Tensor

from benchmarks.ours import simulation
from benchmarks.peers.harness import Job, main
from fedml_noniid.engines.local import LocalSteps


def measure(job: Job, engine: str) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """`share`: the fraction outside the steps, of each round after warm-up.

    All in one process, to time every step.
    """
    shares: list[float] = []
    steps, walk = 0.0, LocalSteps.__call__

    def timed(*given: Any, **named: Any) -> Any:
        nonlocal steps
        before = time.perf_counter()
        found = walk(*given, **named)
        steps += time.perf_counter() - before
        return found

    simulated = simulation(job, engine)
    with patch.object(LocalSteps, "__call__", timed):
        began = time.perf_counter()
        for _ in simulated.rounds():
            now = time.perf_counter()
            shares.append(1 - steps / (now - began))
            began, steps = now, 0.0
    return {"share": shares[job.warm :]}, simulated.outcome.params


if __name__ == "__main__":
    main(measure)
