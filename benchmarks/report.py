"""The report in Markdown: numbers of bench.json into the templates of `templates/`."""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine
from benchmarks.statistics import quartiles
from fedml_noniid.pipelines.reporting import pages

TEMPLATES = Path(__file__).parent / "templates"
ENGINES = ("ours, sequential", "ours, vectorized")
TWO_WORKERS, BF16 = "ours, two workers", "ours, sequential, bf16"
BLOCK = re.compile(r"(<!-- bench\.json -->\n).*(<!-- /bench\.json -->)", re.DOTALL)  # of scale.md


def render(name: str, context: dict[str, Any]) -> str:
    """A template of the benchmarks, filled in."""
    return pages.render(name, context, TEMPLATES)


def markdown(found: dict[str, Any]) -> str:
    """The whole report."""
    more = {
        "machine_line": machine.line(found["machine"]),
        "pairs": pairs(found["workloads"]),
        "rounds": {name: _rounds(of["rows"]) for name, of in found["workloads"].items()},
    }
    return render("bench.md.j2", {"median": median, **found, **more})


def _rounds(rows: list[dict[str, Any]]) -> int:
    """How many rounds each engine of a workload ran; the bare loop takes turns with all of them."""
    runs = [row["repetitions"] for row in rows if "repetitions" in row]
    return min((sum(len(run["wall"]) for run in of) for of in runs), default=0)


def on_scale(page: str, found: dict[str, Any]) -> str:
    """The page docs/results/scale.md with the numbers of a benchmark.

    A page without the marks stays as it is.
    """
    return BLOCK.sub(lambda marks: f"{marks[1]}{_scale(found)}{marks[2]}", page)


def _scale(found: dict[str, Any]) -> str:
    costs = [(name, of["ratio"]) for name, of in found["methods"].items() if not of["problem"]]
    rates = [
        {row["engine"]: row.get("ratio_wall") for row in workload["rows"]}
        for workload in found["workloads"].values()
    ]
    context = {
        "two": [pair["middle"] for pair in pairs(found["workloads"])],
        "costs": sorted(costs, key=lambda cost: cost[1]),
        "bf16": [rate[BF16] / rate[ENGINES[0]] for rate in rates if rate.get(BF16)],
    }
    return render("scale.md.j2", context)


def pairs(workloads: dict[str, Any]) -> list[dict[str, Any]]:
    """Seconds per round of one process and of two, and the quartiles of their ratio, of each
    workload where both were measured."""
    found = []
    for name, workload in workloads.items():
        rows = {row["engine"]: row for row in workload["rows"] if "repetitions" in row}
        if ENGINES[0] in rows and TWO_WORKERS in rows:
            one, two = rows[ENGINES[0]], rows[TWO_WORKERS]
            rounds = ([t for run in row["repetitions"] for t in run["wall"]] for row in (one, two))
            low, middle, high = quartiles([a / b for a, b in zip(*rounds, strict=True)])
            found.append(
                {
                    "workload": name,
                    "one": one["wall_s"],
                    "two": two["wall_s"],
                    "low": low,
                    "middle": middle,
                    "high": high,
                }
            )
    return found
