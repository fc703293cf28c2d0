"""Builds every table and figure of a paper from its studies at one size.

papers/built/<paper>/<size>/report/report.html holds all of them with their pictures. Each target
also has its own Markdown, CSV and PNG. The report can be made before all studies have run. It then
names the missing runs. metrics.json beside the report counts the targets. MLflow has the report as
one run of the experiment "papers".
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.papers import studies
from fedml_noniid.pipelines.papers.targets.build import build
from fedml_noniid.pipelines.papers.targets.measured import Measured
from fedml_noniid.pipelines.papers.targets.ran import what_ran
from fedml_noniid.pipelines.papers.targets.spec import KINDS, Built, Target, of_targets
from fedml_noniid.pipelines.reporting.pages import render
from fedml_noniid.pipelines.reporting.text import markdown
from fedml_noniid.pipelines.tracking.store import Store, spared
from fedml_noniid.pipelines.tracking.sync import sync_reports
from fedml_noniid.plugins.data.files import replace_folder, write_whole

log = logging.getLogger(__name__)
TITLES = {
    "fnr": "FNR-FL",
    "fednnnn": "FedNNNN",
    "ccn": "CCN",
    "fednlr": "FedNLR",
    "rfedavg": "rFedAvg and rFedAvg+",
}
PRINTED = "The paper's own, as it prints it:"
ABOUT = {
    "smoke": (
        "Size smoke: the code path on small data, for seconds. The numbers are not the "
        "paper's experiment."
    ),
    "small": "Size small: the paper's heterogeneity and local work with fewer clients, rounds "
    "or seeds, on a CPU. The "
    "numbers are not the paper's experiment; the studies below say what differs.",
    "paper": (
        "Size paper: the paper's setting where it states one. The protocol below names "
        "what it leaves open."
    ),
}
PLANNED = "Protocol of size paper"  # the other sizes do less of it


class Report(NamedTuple):
    """The folder of a report, and its numbers."""

    folder: Path
    metrics: Mapping[str, float]


def run(place: Workspace, paper: str, size: str) -> None:
    """Builds all targets of a paper, and gives MLflow the report."""
    report = write(paper, size, place.root, of_targets(paper, place.root))
    write_whole(report.folder.parent / "metrics.json", json.dumps(report.metrics, indent=2) + "\n")
    with spared("the report"):
        sync_reports(Store(place.repository, place.tracking_uri), place.root)


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
    files |= {
        f"{name}.md": text(targets[name], one, size, facts).encode() for name, one in built.items()
    }
    sections = [
        {
            "id": name,
            "title": targets[name].title,
            "about": about(targets[name]),
            "protocol": targets[name].protocol,
            "table": one.table,
            "printed": one.printed,
            "picture": one.files.get("png"),
            "words": one.words,
            "missing": _some(one.missing),
            "remarks": one.remarks,
        }
        for name, one in built.items()
    ]
    context = {
        "printed": PRINTED,
        "title": TITLES[paper],
        "size": size,
        "about": ABOUT[size],
        "planned": PLANNED,
        "sections": sections,
        "studies": facts.items(),
    }
    files["report.html"] = render("paper.html.j2", context).encode()
    place = root / (folder or studies.RESULTS / paper / size / "report")
    replace_folder(place, files)
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
    parts = [f"# {target.id}: {target.title}", about(target), ABOUT[size]]
    if built.table:
        parts.append(markdown(built.table))
    if built.printed:
        parts += [PRINTED, markdown(built.printed)]
    if "png" in built.files:
        parts.append(f"![{target.title}]({picture or target.id + '.png'})")
    run = [f"{name}: {facts[name]}." for name in target.studies]
    if built.remarks:
        parts.append(_bullets(built.remarks))
    headed = (
        ("What the numbers say", built.words),
        (PLANNED, target.protocol),
        ("What was run", run),
    )
    parts += [f"## {head}\n\n{_bullets(lines)}" for head, lines in headed if lines]
    if built.missing:
        parts.append(f"Not there yet: {_some(built.missing)}.")
    return "\n\n".join(parts) + "\n"


def about(target: Target) -> str:
    """How to read a target."""
    if target.reported is None:
        return f"Figure of the paper, drawn from our runs ({target.id})."
    if target.kind not in KINDS:
        return (
            f"{target.reported.get('table', target.id)} of the paper, its numbers beside "
            f"ours ({target.id})."
        )
    spread = target.reported.get("spread")
    in_paper = f" ± in the paper: {spread}." if spread else ""
    table, unit = target.reported.get("table", target.id), target.reported.get("unit")
    if unit is None:
        return f"{table} of the paper. In brackets what the paper reports."
    return (
        f"{table} of the paper. Measured, mean ± sample standard deviation over seeds; in "
        "brackets what the paper "
        f"reports, in its unit ({unit}).{in_paper}"
    )


def what_was_run(measured: Measured, targets: Iterable[Target]) -> dict[str, str]:
    """What was run of each study of the targets, in one line."""
    used = {study for target in targets for study in target.studies}
    return {
        name: f"{one.what}: {_ran(measured, one)}"
        for name, one in measured.studies.items()
        if name in used
    }


def _ran(measured: Measured, study: studies.Study) -> str:
    runs, ends = measured.of_study(study.name), measured.ends(study.name)
    if not study.is_run and not runs:
        return f"not run at size {study.size}"
    skipped = measured.skipped(study.name)
    if skipped:
        again = f"make paper-{study.paper} SIZE={study.size}"
        return f"not run, as its data are not there ({skipped}). Once they are: {again}"
    return what_ran(runs, study.items, ends)


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _some(missing: Sequence[str], most: int = 8) -> str:
    more = f" and {len(missing) - most} more" if len(missing) > most else ""
    return ", ".join(missing[:most]) + more
