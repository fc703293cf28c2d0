"""Builds every table and figure of a paper from its studies at one size.

papers/built/<paper>/<size>/report/report.html holds all of them with their pictures. Each target
also has its own Markdown, CSV and PNG. The report can be made before all studies have run. It then
names the missing runs. metrics.json beside the report counts the targets. MLflow has the report as
one run of the experiment "papers". The words are in templates/target.md.j2 and paper.md.j2.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.papers import studies
from fedml_noniid.pipelines.papers.building import build
from fedml_noniid.pipelines.papers.described import what_ran
from fedml_noniid.pipelines.papers.runs import Measured
from fedml_noniid.pipelines.papers.studies import TITLES
from fedml_noniid.pipelines.papers.targets import Built, Target, of_targets
from fedml_noniid.pipelines.reporting.pages import html_page, render
from fedml_noniid.plugins.data.files import replace_folder, write_whole

log = logging.getLogger(__name__)


class Report(NamedTuple):
    """The folder of a report, and its numbers."""

    folder: Path
    metrics: Mapping[str, float]


def run(place: Workspace, paper: str, size: str) -> None:
    """Builds all targets of a paper."""
    report = write(paper, size, place.root, of_targets(paper, place.root))
    write_whole(report.folder.parent / "metrics.json", json.dumps(report.metrics, indent=2) + "\n")


def write(
    paper: str, size: str, root: Path, targets: Mapping[str, Target], folder: Path | None = None
) -> Report:
    """Builds `targets` into `folder`, papers/built/<paper>/<size>/report by default."""
    measured = Measured(paper, size, root)
    built = {name: build(target, measured) for name, target in targets.items()}
    facts = what_was_run(measured, targets.values())
    files = {
        f"{name}.{ending}": content
        for name, one in built.items()
        for ending, content in one.files.items()
    }
    sections = [(targets[name], one) for name, one in built.items()]
    title = f"{TITLES[paper]}: the paper's tables and figures, size {size}"
    context = {"title": title, "size": size, "sections": sections, "facts": facts}
    pictures = {name: content for name, content in files.items() if name.endswith(".png")}
    page = html_page(title, render("paper.md.j2", context), pictures)
    for target, one in sections:
        files[f"{target.id}.md"] = text(target, one, size, facts).encode()
    place = root / (folder or studies.RESULTS / paper / size / "report")
    replace_folder(place, files | {"report.html": page.encode()})
    metrics = numbers(built)
    log.info(
        "%s, size %s: %d of %d tables and figures are whole: %s",
        paper,
        size,
        metrics["whole"],
        len(built),
        place,
    )
    return Report(place, metrics)


def numbers(built: Mapping[str, Built]) -> dict[str, float]:
    """How many targets there are, how many are whole, and how well rankings agree with the paper's,
    where known."""
    taus = [tau for one in built.values() for tau in one.taus]
    agreement = {"kendall_tau_mean": statistics.fmean(taus)} if taus else {}
    whole = sum(not one.missing for one in built.values())
    return {"targets": len(built), "whole": whole, "rankings": len(taus), **agreement}


def text(
    target: Target, built: Built, size: str, facts: Mapping[str, str], picture: str = ""
) -> str:
    """A target as Markdown; `facts` say what was run of each study, `picture` is the file if it has
    another name."""
    context = {"target": target, "built": built, "size": size, "facts": facts}
    return render("target.md.j2", context | {"picture": picture or f"{target.id}.png"})


def what_was_run(measured: Measured, targets: Iterable[Target]) -> dict[str, str]:
    """What was run of each study of the targets, in one line."""
    used = {study for target in targets for study in target.studies}
    return {
        name: f"{one.what}: {_ran(measured, one)}"
        for name, one in measured.studies.items()
        if name in used
    }


def _ran(measured: Measured, study: studies.Study) -> str:
    runs = measured.of_study(study.name)
    if not study.is_run and not runs:
        return f"not run at size {study.size}"
    skipped = measured.skipped(study.name)
    if skipped:
        again = f"make paper-{study.paper} SIZE={study.size}"
        return f"not run, as its data are not there ({skipped}). Once they are: {again}"
    return what_ran(runs, study.items, measured.diverged_items(study.name))
