"""What each method costs beside what it reaches: accuracy, seconds, MiB. For the terminal only.

Seconds differ from run to run, so they are no part of the report, which DVC certifies. They come
from the store of finished work on this machine.
"""

from __future__ import annotations

import statistics
import textwrap
from pathlib import Path

from fedml_noniid.metrics import metric_of
from fedml_noniid.pipelines.experiment import results
from fedml_noniid.pipelines.reporting.text import MIB, NONE, plain

SUMMARY = Path("report") / "summary.csv"
SECONDS = (
    "Seconds: wall time of a training's rounds, mean over seeds, on the machine that trained it. "
    "With `threads: 1` it is also the CPU time, unless more processes run than there are cores. "
    "-: trained elsewhere."
)
WIDTH = 110  # columns of a line


def text(root: Path, repository: Path | None = None) -> str:
    """A table for each scenario of the last report in `root`, best method first.

    UserError without a report.
    """
    seconds: dict[tuple[str, str], list[float]] = {}
    for run in results.read(root, repository):
        if run.seconds:
            seconds.setdefault((run.scenario, run.recipe), []).append(sum(run.seconds))
    tables: dict[str, list[list[str]]] = {}
    for row in results.table(root / SUMMARY):
        scenario, recipe = row["scenario"], row["recipe"]
        main = row.get("metric", "accuracy")
        metric = metric_of(main)
        taken = seconds.get((scenario, recipe))
        cells = [
            recipe,
            f"{metric.factor * float(row['final_mean']):.{metric.decimals}f}",
            NONE if taken is None else f"{statistics.fmean(taken):.3g}",
            f"{float(row['traffic_total_bytes_mean']) / MIB:.3g}",
        ]
        title = "%" if main == "accuracy" else f"{metric.label}{metric.unit}"
        header = ["method", f"last round, {title}", "seconds/run", "MiB/run"]
        tables.setdefault(scenario, [header]).append(cells)
    written = [f"{scenario}: cost\n\n{plain(table)}\n" for scenario, table in tables.items()]
    return "".join([*written, textwrap.fill(SECONDS, WIDTH), "\n"])
