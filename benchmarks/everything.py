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

from benchmarks import curves, methods, repeatability, scaling
from benchmarks.comparison import compare
from benchmarks.engines import Engine, others, ours, variants
from benchmarks.machine import Watch, line
from benchmarks.plot import picture
from benchmarks.processes import FailedError, measure
from benchmarks.report import markdown, on_scale
from benchmarks.workloads import WORKLOADS, Workload, write_job
from fedml_noniid.core.errors import UserError
from fedml_noniid.data.checks import known
from fedml_noniid.data.files import write_whole

SCALE = "scale.md"  # the page of results with numbers of the benchmark
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
    found: dict[str, Any] = {
        "quick": quick,
        "repetitions": repetitions,
        "skipped": skipped,
        "scaling": {},
        "overhead": {},
        "methods": {},
        "repeatability": [],
    }
    found["workloads"] = {
        w.name: compare(w, [*ours(w), *variants(w), *simulators], repetitions, folder, _log)
        for w in taken
    }
    for workload in taken:
        if workload.name in scaling.SPLIT:
            found["overhead"][workload.name] = scaling.overhead(workload, quick, folder, _log)
        if workload.name == scaling.MLP.name:
            found["scaling"] = scaling.sweep(
                scaling.swept()[1:] if quick else scaling.swept(), quick, folder, _log
            )
            found["methods"] = _methods(workload, quick, folder)
            # Our sequential engine is the one with workers. With --quick it is the only one of
            # ours.
            repeated = [*ours(workload)[2 if quick else 1 :], *simulators]
            found["repeatability"] = repeatability.rows(
                workload.quick(), repeated, not quick, folder, _log
            )
    return found | {"machine": watch.found()}


def _methods(workload: Workload, quick: bool, folder: Path) -> dict[str, Any]:
    names, path = FEW_METHODS if quick else methods.federated(), folder / "methods.npz"
    write_job(replace(workload, rounds=min(workload.rounds, METHOD_ROUNDS)), path)
    _log("methods: " + ", ".join(names))
    costs, _ = measure(Engine("methods", "benchmarks.methods", ",".join(names)), path)
    return costs


def write(found: dict[str, Any], to: Path) -> str:
    """Writes bench.md, bench.json, bench.png, curves.csv and the numbers of scale.md, each whole or
    not at all.

    Returns the report.
    """
    text = markdown(found)
    write_whole(to / "bench.json", json.dumps(found, indent=1) + "\n")
    write_whole(to / "bench.png", picture(found))
    page = to / SCALE
    if page.is_file() and not found["quick"]:
        write_whole(page, on_scale(page.read_text(), found))
        curves.write(found["scaling"], to, line(found["machine"]))
    write_whole(to / "bench.md", text)
    return text


def bench(only: str | None, quick: bool, repetitions: int, to: Path) -> str:
    """Measures, writes the report to the folder `to` and returns it.

    UserError if a measurement fails.

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
            return write(run(workloads, quick, repetitions, Path(folder)), to)
    except FailedError as error:
        raise UserError(str(error)) from None
