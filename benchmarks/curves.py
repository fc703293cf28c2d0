"""Seconds of a round as curves: `python -m benchmarks curves` and `bench` write
docs/results/curves.csv and a block of docs/results/scale.md.

The measurements are those of `scaling`.
"""

from __future__ import annotations

import csv
import io
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import machine, scaling
from benchmarks.report import render
from fedml_noniid.data.files import write_whole

FILE = "curves.csv"  # in docs/results
BLOCK = re.compile(r"(<!-- curves\.csv -->\n).*(<!-- /curves\.csv -->)", re.DOTALL)  # of scale.md
TITLES = {
    "cohort": "clients per round, of 300",
    "clients": "clients in total, 100 per round",
    "hidden": "width of the MLP's hidden layer",
    "workers": "processes, 1,020,010 parameters",
}
COLUMNS = ("curve", "value", "engine", "round_s", "peak_mb")


def table(found: dict[str, Any]) -> str:
    """The CSV of what `scaling.sweep` has found."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(COLUMNS)
    for curve, sweep in found.items():
        for engine, of in sweep["engines"].items():
            name = engine.removeprefix("ours, ")
            for row in zip(sweep["values"], of["wall_s"], of["peak_mb"], strict=True):
                value, wall, mb = row
                out.writerow((curve, value, name, f"{wall:.6g}", f"{mb:.0f}"))
    return text.getvalue()


def on_page(page: str, content: str, note: str = "") -> str:
    """The page docs/results/scale.md with the curves of a CSV.

    `note`: the machine, in one line; without it the page's own line stays.
    """
    curves: dict[str, dict[str, dict[str, str]]] = {}
    most: list[float] = []
    for row in csv.DictReader(io.StringIO(content)):
        engines = curves.setdefault(row["curve"], {})
        engines.setdefault(row["engine"], {})[row["value"]] = row["round_s"]
        most.append(float(row["peak_mb"]))
    total = [[*map(float, of.values())] for of in curves["clients"].values()]
    kept = re.search(r"^Machine of the curves: (.*)$", page, re.MULTILINE)
    context = {
        "titles": TITLES,
        "curves": curves,
        "sizes": [*map(int, next(iter(curves["clients"].values())))],
        "times": [of[-1] / of[0] for of in total],
        "most": max(most),
        "machine": note or (kept[1] if kept else ""),
    }
    return BLOCK.sub(lambda marks: f"{marks[1]}{render('curves.md.j2', context)}{marks[2]}", page)


def write(found: dict[str, Any], results: Path, note: str) -> None:
    """Writes the table into the folder `results`, and the block of the page beside it."""
    page, content = results / "scale.md", table(found)
    write_whole(page, on_page(page.read_text(), content, note))
    write_whole(results / FILE, content)


def measure(root: Path) -> None:
    """Measures the curves alone, and writes them."""
    watch = machine.Watch()

    def log(line: str) -> None:
        sys.stderr.write(line + "\n")

    with tempfile.TemporaryDirectory() as folder:
        found = scaling.sweep(scaling.swept(), False, Path(folder), log)
    write(found, root / "docs" / "results", machine.line(watch.found()))
