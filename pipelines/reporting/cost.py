"""What each method costs beside what it reaches: accuracy, seconds, MiB. For the terminal only.

Seconds differ from run to run, so they are no part of the report, which DVC certifies. They come
from the store of finished work on this machine.
"""

from __future__ import annotations

import statistics
import textwrap
from pathlib import Path

from fedml_noniid.pipelines.experiment import results
from fedml_noniid.pipelines.reporting.text import NONE, plain

SUMMARY = Path("report") / "summary.csv"
MIB = 2**20
NOTE = (
    "Seconds: wall time of a training's rounds, mean over seeds, on the machine that trained "
    "it. With `threads: 1` it "
    "is also the CPU time, unless more processes run than there are cores. -: trained elsewhere."
)


def text(root: Path, repository: Path | None = None) -> str:
    """A table for each scenario of the last report in `root`, best method first.

    UserError without a report.
    """
    rows, seconds = results.table(root / SUMMARY), dict[tuple[str, str], list[float]]()
    for run in results.read(root, repository):
        if run.seconds:
            seconds.setdefault((run.scenario, run.recipe), []).append(sum(run.seconds))
    tables = []
    for scenario in dict.fromkeys(row["scenario"] for row in rows):
        cells = [["method", "last round, %", "seconds/run", "MiB/run"]]
        for row in rows:
            if row["scenario"] == scenario:
                taken = seconds.get((scenario, row["recipe"]))
                mean = NONE if taken is None else f"{statistics.fmean(taken):.3g}"
                accuracy, traffic = (
                    float(row[f"{of}_mean"]) for of in ("final", "traffic_total_bytes")
                )
                cells.append([row["recipe"], f"{100 * accuracy:.2f}", mean, f"{traffic / MIB:.3g}"])
        tables.append(f"{scenario}: cost\n\n{plain(cells)}")
    return "\n".join([*tables, textwrap.fill(NOTE, 110) + "\n"])
