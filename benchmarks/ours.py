"""Measures our simulation: `python -m benchmarks.ours RESULT
[bf16-]sequential|vectorized|workers:N JOB`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from benchmarks.peers.harness import Job, Meter, main
from benchmarks.workloads import SEED, Workload, network
from fedml_noniid.core.data import Samples
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.simulate import simulate

LOOKED_AT = 10  # samples of the evaluation after the last round


def simulation(
    job: Job,
    engine: str,
    recipe: str = "fedavg",
    public: Samples | None = None,
) -> Simulation:
    """The job as one of our simulations.

    `workers:N` is the sequential engine in N processes, `bf16-` a precision.
    """
    settings = Workload(**job.settings)
    indices = [
        np.arange(job.samples_of(k).start, job.samples_of(k).stop) for k in range(settings.clients)
    ]
    precision = "bf16" if engine.startswith("bf16-") else "float32"
    local = LocalTraining(
        lr=settings.lr, epochs=settings.epochs, batch_size=settings.batch, precision=precision
    )
    rounds = settings.warm + settings.rounds
    kind, _, workers = engine.removeprefix("bf16-").partition(":")
    return simulate(
        recipe,
        {},
        Federation.from_indices(
            Samples(job.x, job.y),
            indices,
            Samples(job.x[:LOOKED_AT], job.y[:LOOKED_AT]),
            public=public,
        ),
        Plan(
            network(settings),
            local,
            rounds,
            settings.cohort,
            SEED,
            evaluate_every=rounds,
            engine="sequential" if kind == "workers" else kind,
            workers=int(workers or 1),
        ),
    )


def timed(simulated: Simulation) -> tuple[Meter, Mapping[str, Tensor]]:
    """(times of the rounds, final weights). Work before the first round is not timed."""
    meter = Meter()
    meter.begin()
    for _ in simulated.rounds():
        meter.end()
        meter.begin()
    return meter, simulated.outcome.params


def measure(job: Job, engine: str) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Measures one job with one engine."""
    simulated = simulation(job, engine)
    meter, weights = timed(simulated)
    return meter.measured(job.warm), weights


if __name__ == "__main__":
    main(measure)
