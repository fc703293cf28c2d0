"""Stage report: tables, pictures and sentences on all items -> report/."""

from __future__ import annotations

import logging

from fedml_noniid.pipelines.experiment import cache
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.reporting.report import write

log = logging.getLogger(__name__)


def run(workspace: Workspace) -> None:
    """Writes the report. UserError if an input file is damaged."""
    for name in ("partitions", "runs", "evaluation"):
        for folder in sorted((workspace.root / name).glob("*/")):
            cache.check(folder)
    folder = write(workspace.root).relative_to(workspace.root)
    log.info(
        "%s is written, and the same as text in %s", folder / "report.html", folder / "table.txt"
    )
