"""What `noniid papers` does. All studies share the store of finished work with `noniid run`."""

from __future__ import annotations

import logging
from pathlib import Path

from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.papers import report
from fedml_noniid.pipelines.papers.studies import PAPERS, RESULTS, of_paper
from fedml_noniid.pipelines.papers.targets.spec import Target, of_targets, paper_of

log = logging.getLogger(__name__)


def targets(root: Path) -> list[tuple[str, Target]]:
    """(title of the paper, target) of every table and figure."""
    return [
        (report.TITLES[name], one) for name in PAPERS for one in of_targets(name, root).values()
    ]


def run(place: Workspace, paper: str, size: str) -> Path:
    """Runs the studies of a paper and builds its report. Returns the report's folder. UserError."""
    # Imported here and below: it imports mlflow, which takes seconds.
    from fedml_noniid.pipelines.papers.study import execute, settled

    studies = of_paper(paper, size, place.root)
    for study in studies.values():
        execute(place, study)
    done, of = settled(place.root, studies.values())
    log.info("%s %s: %d of the paper's %d items are settled", paper, size, done, of)
    report.run(place, paper, size)
    return place.root / RESULTS / paper / size / "report"


def build(place: Workspace, name: str, size: str) -> Path:
    """Runs the studies of one table or figure and builds it alone.

    Returns its Markdown file. UserError.
    """
    paper = paper_of(name, place.root)
    studies, target = of_paper(paper, size, place.root), of_targets(paper, place.root)[name]
    from fedml_noniid.pipelines.papers.study import execute

    for study in target.studies:
        execute(place, studies[study])
    folder = RESULTS / "single" / f"{name}-{size}"
    return report.write(paper, size, place.root, {name: target}, folder).folder / f"{name}.md"
