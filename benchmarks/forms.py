"""What each faster form of a step saves: `python -m benchmarks.forms WORKLOAD [TURNS]`.

Each form is run and left out in turns, in CPU seconds of one process. `FORMS` leaves a form out by
patching the place that chooses it.
"""

from __future__ import annotations

import csv
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.ours import simulation
from benchmarks.peers.harness import read_job
from benchmarks.workloads import WORKLOADS, write_job
from fedml_noniid.core.training import Step
from fedml_noniid.core.trees import Params, Tree
from fedml_noniid.engines import local
from fedml_noniid.models.stacked import Stacked

Without = Callable[[], AbstractContextManager[Any]]  # inside, steps run without the form


def _plain(walk: local.LocalSteps, factor: Params, owned: bool) -> Step:
    return Step(walk.task.optimizer, walk.hooks.term, factor)


@dataclass(frozen=True)
class _Fresh(local.InMemory):
    def __call__(
        self, grads: Params, params: Params, state: Tree, s: int = 0, out: Params | None = None
    ) -> Any:
        return super().__call__(grads, params, state, s)


def _fresh(walk: local.LocalSteps, factor: Params, owned: bool) -> Step:
    optimizer = walk.task.optimizer
    return _Fresh(
        optimizer, walk.hooks.term, factor, fused=local.plain_rate(optimizer), update=optimizer.step
    )


FORMS: dict[str, Without] = {
    "one pass, in place": partial(patch.object, local, "step_form", _plain),
    "in place": partial(patch.object, local, "step_form", _fresh),
    "no record for autograd": partial(patch.object, torch, "inference_mode", nullcontext),
    "written-out gradient": partial(patch.object, Stacked, "written_out", False),
}


def ratio(form: str, workload: str, engine: str, turns: int, at_once: int) -> list[float]:
    """CPU time without the form over that with it, of each turn."""
    settings = replace(WORKLOADS[workload], rounds=turns * at_once)
    with TemporaryDirectory() as folder:
        write_job(settings, Path(folder) / "job.npz")
        job = read_job(Path(folder) / "job.npz")
    ways = [
        (nullcontext, simulation(job, engine).rounds()),
        (FORMS[form], simulation(job, engine).rounds()),
    ]

    def taken(without: Without, rounds: Iterator[Any], count: int) -> float:
        with without():
            began = time.process_time()
            for _ in range(count):
                next(rounds)
            return time.process_time() - began

    for way in ways:
        taken(*way, settings.warm)
    found = []
    for turn in range(turns):
        times = [taken(*way, at_once) for way in (ways if turn % 2 else ways[::-1])]
        found.append(times[1] / times[0] if turn % 2 else times[0] / times[1])
    return found


if __name__ == "__main__":
    name, number = sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else 10
    for engine in ("sequential", "vectorized"):
        if engine == "vectorized" and name not in ("mlp", "partial"):
            continue
        for form in FORMS:
            ratios = sorted(ratio(form, name, engine, number, WORKLOADS[name].at_once))
            spread = [f"{value:.3f}" for value in (median(ratios), ratios[0], ratios[-1])]
            csv.writer(sys.stdout, lineterminator="\n").writerow([form, name, engine, *spread])
            sys.stdout.flush()
