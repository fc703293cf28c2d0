"""Part 2: the cost of each method relative to FedAvg: `python -m benchmarks.methods RESULT
NAME,NAME,... JOB`.

A method and FedAvg take turns in one process, with the vectorized engine and default
hyper-parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from torch import Tensor

from benchmarks.ours import simulation, timed
from benchmarks.peers.harness import Job, main
from benchmarks.statistics import ratio
from fedml_noniid.core.component import Public
from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import UserError
from fedml_noniid.plugins.registry import METHODS

TURNS = 3
PUBLIC = 500  # samples of the public split, for methods that need one
ENGINE = "vectorized"


def federated() -> list[str]:
    """The methods that train clients."""
    return sorted(name for name, kind in METHODS.items() if not kind().needs.pooled)


def cost(job: Job, name: str) -> dict[str, Any]:
    """The median round relative to FedAvg's, and the time of the end after the last round, in
    rounds of FedAvg."""
    public = (
        Samples(job.x[:PUBLIC], job.y[:PUBLIC])
        if METHODS[name]().needs.public > Public.RECORDED
        else None
    )
    plain: list[float] = []
    seconds: list[float] = []
    end: list[float] = []
    try:
        for _ in range(TURNS):
            for recipe, rounds in (("fedavg", plain), (name, seconds)):
                meter, _ = timed(
                    simulation(job, ENGINE, recipe, public if recipe == name else None)
                )
                # `begin` is part of the first round's time, `finish` of the last round's.
                *walls, last = meter.wall[job.warm : len(job.cohorts)]
                rounds.append(median(walls))
            end.append(max(0.0, last - seconds[-1]))
    except UserError as error:
        return {"problem": str(error)}
    return {
        "ratio": ratio(seconds, plain),
        "end": ratio(end, plain),
        "wall_s": seconds,
        "fedavg_s": plain,
        "problem": "",
    }


def measure(job: Job, names: str) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """The costs of the named methods."""
    return {name: cost(job, name) for name in names.split(",")}, {}


if __name__ == "__main__":
    main(measure)
