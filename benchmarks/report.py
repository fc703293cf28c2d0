"""Pages of docs/results: numbers in the templates of `templates/`, with their tables as CSV."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from benchmarks import machine
from benchmarks.statistics import quartiles
from fedml_noniid.data.files import write_whole
from fedml_noniid.pipelines.reporting import pages

RESULTS = Path(__file__).parents[1] / "docs" / "results"
TEMPLATES = Path(__file__).parent / "templates"
ONE_PROCESS, TWO_PROCESSES = "ours, sequential", "ours, two workers"


def render(name: str, context: Mapping[str, Any]) -> str:
    """Fills a template in."""
    return pages.render(f"{name}.md.j2", dict(context), TEMPLATES)


def write(
    folder: Path, name: str, context: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]
) -> str:
    """Writes the tables, `NAME.csv` by name, and the page. Returns the page."""
    for title, table in tables.items():
        write_whole(folder / f"{title}.csv", str(table.to_csv(index=False, lineterminator="\n")))
    page = render(name, context)
    write_whole(folder / f"{name}.md", page)
    return page


def of_bench(numbers: Mapping[str, Any]) -> str:
    """Returns the page bench.md of the numbers of bench.json."""
    more = {
        "machine_line": machine.line(numbers["machine"]),
        "pairs": pairs(numbers["workloads"]),
        "rounds": {
            name: _rounds(workload["rows"]) for name, workload in numbers["workloads"].items()
        },
    }
    return render("bench", {"median": median, **numbers, **more})


def _rounds(rows: list[dict[str, Any]]) -> int:
    """How many rounds each engine of a workload ran; the bare loop takes turns with all of them."""
    runs = [row["repetitions"] for row in rows if "repetitions" in row]
    return min((sum(len(run["wall"]) for run in own_runs) for own_runs in runs), default=0)


def pairs(workloads: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Seconds per round of one process and of two, and the quartiles of their ratio, of each
    workload where both were measured."""
    lines = []
    for name, workload in workloads.items():
        rows = {row["engine"]: row for row in workload["rows"] if "repetitions" in row}
        if ONE_PROCESS in rows and TWO_PROCESSES in rows:
            single, double = rows[ONE_PROCESS], rows[TWO_PROCESSES]
            rounds = (
                [t for run in row["repetitions"] for t in run["wall"]] for row in (single, double)
            )
            low, middle, high = quartiles([a / b for a, b in zip(*rounds, strict=True)])
            line = {"workload": name, "one": single["wall_s"], "two": double["wall_s"]}
            lines.append(line | {"low": low, "middle": middle, "high": high})
    return lines
