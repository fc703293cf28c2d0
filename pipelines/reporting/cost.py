"""What each method costs beside what it reaches: accuracy, seconds, MiB. For the terminal only.

Seconds differ from run to run, so they are no part of the report, which DVC certifies. They come from the store of
finished work on this machine.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

from fedml_noniid.pipelines.experiment import config, results
from fedml_noniid.pipelines.reporting import summary
from fedml_noniid.pipelines.reporting.summary import Scenario, spread
from fedml_noniid.pipelines.reporting.tables import MIB, plain
from fedml_noniid.pipelines.reporting.text import NONE

NOTE = (
    "Seconds: wall time of a training's rounds, mean over seeds, on the machine that trained it. With `threads: 1` it "
    "is also the CPU time, unless more processes run than there are cores. -: trained elsewhere."
)


def text(root: Path, repository: Path | None = None) -> str:
    """A table for each scenario of the experiment in `root`, best method first. Empty without results."""
    settings, found = config.load(root), results.read(root, repository)
    summed = (summary.scenario(name, found, settings.recipe_names, settings.seeds) for name in settings.scenario_names)
    tables = [f"{one.name}: cost\n\n{plain(_rows(one))}" for one in summed if one is not None]
    return "\n".join([*tables, textwrap.fill(NOTE, 110) + "\n"]) if tables else ""


def _rows(scenario: Scenario) -> list[list[str]]:
    rows = [["method", "last round, %", "seconds/run", "MiB/run"]]
    for line in scenario.lines:
        taken = [sum(run.seconds) for run in scenario.results if run.recipe == line.recipe and run.seconds]
        seconds = spread(taken)
        cells = f"{100 * line.final.mean:.2f}", f"{line.traffic_total.mean / MIB:.3g}"
        rows.append([line.label, cells[0], NONE if seconds is None else f"{seconds.mean:.3g}", cells[1]])
    return rows
