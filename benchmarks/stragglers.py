"""Ten ways to treat slow clients, by the virtual clock: `python -m benchmarks stragglers` writes
docs/results/stragglers.*."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pandas as pd

import fedml_noniid as nd
from benchmarks import report
from fedml_noniid.data.files import write_whole
from fedml_noniid.metrics import METRICS
from fedml_noniid.pipelines.experiment import provenance
from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.reporting import clock
from fedml_noniid.pipelines.reporting.text import NONE, markdown

UNTIL_S = 90.0
COMMON: dict[str, Any] = {
    "partition": "dirichlet",
    "alpha": 0.3,
    "clients": 20,
    "model": "mlp",
    "epochs": 2,
    "batch_size": 16,
    "lr": 0.1,
    "rounds": 3000,
    "until_s": UNTIL_S,
    "devices": {"step_ms": 20.0, "spread": 10.0, "down_mbit": 2.0, "up_mbit": 0.5},
}
HALF, PARTIAL = {"participation": 0.5}, {"deadline_s": 2.0, "late": "partial"}
FIVE = {"waits": {"buffer": 5, "concurrency": 10}}
# Way, recipe, settings.
WAYS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("all of 10", "fedavg", HALF),
    ("deadline, dropped", "fedavg", {**HALF, "waits": {"deadline_s": 2.0, "late": "drop"}}),
    ("deadline, partial", "fedavg", {**HALF, "waits": PARTIAL}),
    ("deadline, partial", "fedprox", {**HALF, "waits": PARTIAL, "fedprox": {"mu": 0.1}}),
    ("deadline, partial", "fednova", {**HALF, "waits": PARTIAL}),
    ("first 10 of 13", "fedavg", {"waits": {"first": 10, "sampled": 13}}),
    ("K = 10 of 10", "fedbuff", {"waits": {"buffer": 10, "concurrency": 10}}),
    ("K = 5 of 10", "fedbuff", FIVE),
    ("K = 5, s = 1", "fedbuff", {**FIVE, "fedbuff": {"exponent": 0.0}}),
    ("K = 1 of 10", "fedasync", {"waits": {"buffer": 1, "concurrency": 10}}),
)
METRIC = METRICS["accuracy"]
RATIO = 7  # the column of `clock.table` with times as fast
RUN = ("way", "recipe", "seed", "steps", "wasted_s", "staleness", "accuracy", "weights_sha256")


def write(seeds: int, folder: Path = report.RESULTS, **options: Any) -> str:
    """Trains all ways with so many seeds, and writes page, tables and picture. Returns the page.
    `options`: in place of COMMON."""
    data, runs, lines = nd.load("digits"), list[ItemResult](), list[tuple[object, ...]]()
    for way, recipe, settings in WAYS:
        arguments = COMMON | settings | options | {"seeds": [*range(seeds)]}
        result = nd.run(recipe, data, progress=False, **arguments)
        for run in result._runs:
            runs.append(replace(run, scenario=way))
            wasted, stale = (run.column(name) for name in ("wasted_s", "staleness"))
            numbers = (len(stale), sum(wasted), fmean(stale), run.tested[-1])
            lines.append((way, recipe, run.seed, *numbers, run.tags["weights_sha256"]))
    frame = pd.DataFrame(lines, columns=RUN)
    return page(frame, clock.read(runs), provenance.git_commit(), folder)


def page(frame: pd.DataFrame, curves: clock.Curves, commit: str, folder: Path) -> str:
    """Writes page, tables and picture of trained runs. `frame`: columns RUN. Returns the page."""
    cells, facts = clock.table(curves, METRIC), frame.groupby(["way", "recipe"], sort=False)
    means = facts[["steps", "wasted_s", "staleness"]].mean()
    for row, (steps, wasted_s, staleness) in zip(cells[1:], means.to_numpy(), strict=True):
        row += [f"{steps:.0f}", f"{wasted_s:.0f}", f"{staleness:.1f}"]
    timed = [row for row in cells[2:] if row[RATIO] != NONE]
    best = max(timed, key=lambda row: float(row[RATIO].split()[0]), default=cells[1])
    cells[0] = ["way", *cells[0][1:], "steps", "wasted, s", "mean staleness"]
    read = pd.concat(curves, names=["way", "recipe", "clock_s"]).round(6).reset_index()
    context = {
        "table": markdown(cells),
        "note": clock.note(curves, METRIC),
        "commit": commit,
        "seeds": frame["seed"].nunique(),
        "until_s": UNTIL_S,
        "first": cells[1],
        "best": best,
        "ratio": best[RATIO],
    }
    write_whole(folder / "stragglers.png", clock.picture(curves, METRIC))
    tables = {"stragglers": frame, "stragglers-curves": read}
    return report.write(folder, "stragglers", context, tables)
