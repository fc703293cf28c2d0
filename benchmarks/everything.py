"""`python -m benchmarks bench`: runs all measurements and writes the report to docs/results."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import methods, repeatability, report
from benchmarks.comparison import compare
from benchmarks.engines import Engine, others, ours, variants
from benchmarks.machine import Watch
from benchmarks.plot import picture
from benchmarks.processes import FailedError, measure
from benchmarks.workloads import WORKLOADS, Workload, write_job
from fedml_noniid.core.errors import UserError
from fedml_noniid.data.checks import known
from fedml_noniid.data.files import write_whole

METHOD_ROUNDS = 10  # rounds per turn, of each method and of FedAvg
FEW_METHODS = ["scaffold"]  # the methods with --quick


def _log(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


def run(
    workloads: Sequence[Workload], quick: bool, repetitions: int, folder: Path
) -> dict[str, Any]:
    """Runs all measurements and returns the numbers. `folder` is for job files."""
    watch, repetitions = Watch(), 1 if quick else repetitions
    taken = [workload.quick() if quick else workload for workload in workloads]
    simulators, skipped = others(os.environ, quick)
    numbers: dict[str, Any] = {
        "quick": quick,
        "repetitions": repetitions,
        "skipped": skipped,
        "methods": {},
        "repeatability": [],
    }
    numbers["workloads"] = {
        w.name: compare(w, [*ours(w), *variants(w), *simulators], repetitions, folder, _log)
        for w in taken
    }
    for workload in taken:
        if workload.name == "mlp":
            numbers["methods"] = _methods(workload, quick, folder)
            # Our sequential engine is the one with workers. With --quick it is the only one of
            # ours.
            repeated = [*ours(workload)[2 if quick else 1 :], *simulators]
            numbers["repeatability"] = repeatability.rows(workload.quick(), repeated, folder, _log)
    return numbers | {"machine": watch.facts()}


def _methods(workload: Workload, quick: bool, folder: Path) -> dict[str, Any]:
    names, path = FEW_METHODS if quick else methods.federated(), folder / "methods.npz"
    write_job(replace(workload, rounds=min(workload.rounds, METHOD_ROUNDS)), path)
    _log("methods: " + ", ".join(names))
    costs, _ = measure(Engine("methods", "benchmarks.methods", ",".join(names)), path)
    return costs


def bench(only: str | None, quick: bool, repetitions: int, to: Path) -> str:
    """Measures, and writes bench.md, bench.json and bench.png into the folder `to`.

    Returns the page. UserError if a measurement fails.

    `only`: a workload, None for all. `quick`: one repetition, few rounds, no FedML: tests that it
    runs.
    """
    workloads = (
        list(WORKLOADS.values())
        if only is None
        else [WORKLOADS[known("workload", only, WORKLOADS)]]
    )
    try:
        with tempfile.TemporaryDirectory() as folder:
            numbers = run(workloads, quick, repetitions, Path(folder))
    except FailedError as error:
        raise UserError(str(error)) from None
    page = report.of_bench(numbers)
    write_whole(to / "bench.json", json.dumps(numbers, indent=1) + "\n")
    write_whole(to / "bench.png", picture(numbers["workloads"]))
    write_whole(to / "bench.md", page)
    return page
