"""What each method costs beside what it reaches: accuracy, seconds, MiB. For the terminal only.

Seconds differ from run to run, so they are no part of the report, which DVC certifies. They come
from the store of finished work on this machine.
"""

from __future__ import annotations

import statistics
from pathlib import Path

from fedml_noniid.pipelines.experiment import results
from fedml_noniid.pipelines.reporting import pages
from fedml_noniid.pipelines.reporting.text import MIB, NONE
from fedml_noniid.plugins.metrics import metric_of

SUMMARY = Path("report") / "summary.csv"


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
        title = "%" if main == "accuracy" else f"{metric.words}{metric.unit}"
        header = ["method", f"last round, {title}", "seconds/run", "MiB/run"]
        tables.setdefault(scenario, [header]).append(cells)
    return pages.render("cost.txt.j2", {"tables": tables})
