"""Stage paper: every table and figure of a paper from its studies at one size -> papers/<paper>/<size>/report/.

report.html needs nothing else; each target also has its own Markdown, CSV and PNG. What is not run yet is said so, so
that a part of the studies already gives a part of the tables. metrics.json beside it counts what is there, for `dvc
metrics show`; MLflow has all of it as one run of the experiment "papers".
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pipelines import cli, config, studies, tracking
from pipelines.report import render
from pipelines.targets.build import build
from pipelines.targets.measured import Measured
from pipelines.targets.ran import what_ran
from pipelines.targets.spec import KINDS, Built, Target, of_targets
from plugins.data.files import replace_folder, write_whole

log = logging.getLogger(__name__)
TITLES = {
    "fnr": "FNR-FL", "fednnnn": "FedNNNN", "ccn": "CCN", "fednlr": "FedNLR", "rfedavg": "rFedAvg and rFedAvg+",
}  # fmt: skip
PRINTED = "The paper's own, as it prints it:"
ABOUT = {
    "smoke": "Size smoke: the code path on small data, for seconds. The numbers are not the paper's experiment.",
    "small": "Size small: the paper's heterogeneity and local work with fewer clients, rounds or seeds, on a CPU. The "
    "numbers are not the paper's experiment; the studies below say what differs.",
    "paper": "Size paper: the paper's setting where it states one. The protocol below names what it leaves open.",
}


PLANNED = "Protocol of size paper"  # of which the other sizes take less


class Report(NamedTuple):
    """What has been written."""

    folder: Path
    metrics: Mapping[str, float]


def run(options: argparse.Namespace) -> None:
    """Builds all targets of the paper."""
    root = config.root()
    report = write(options.paper, options.size, root, of_targets(options.paper, root), "report")
    write_whole(report.folder.parent / "metrics.json", json.dumps(report.metrics, indent=2) + "\n")
    tracking.log_report(config.store(), report.folder)


def write(paper: str, size: str, root: Path, targets: Mapping[str, Target], folder: str) -> Report:
    """Builds `targets` into papers/<paper>/<size>/<folder>."""
    measured = Measured(paper, size, root)
    built = {name: build(target, measured) for name, target in targets.items()}
    files = {f"{name}.{ending}": content for name, one in built.items() for ending, content in one.files.items()}
    facts = what_was_run(measured, targets.values())
    for name, one in built.items():
        files[f"{name}.md"] = text(targets[name], one, size, facts).encode()
    sections = [
        {
            "id": name, "title": targets[name].title, "about": about(targets[name]), "protocol": targets[name].protocol,
            "table": one.table, "printed": one.printed, "picture": one.files.get("png"), "words": one.words,
            "missing": _some(one.missing), "remarks": one.remarks,
        }
        for name, one in built.items()
    ]  # fmt: skip
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
    place = root / studies.RESULTS / paper / size / folder
    replace_folder(place, files)
    metrics = numbers(built)
    log.info("%s, size %s: %d of %d tables and figures are whole: %s", paper, size, metrics["whole"], len(built), place)
    return Report(place, metrics)


def numbers(built: Mapping[str, Built]) -> dict[str, float]:
    """How many targets there are and how many lack nothing; how well rankings agree with the paper's, where known."""
    taus = [tau for one in built.values() for tau in one.taus]
    agreement = {"kendall_tau_mean": statistics.fmean(taus)} if taus else {}
    whole = sum(not one.missing for one in built.values())
    return {"targets": len(built), "whole": whole, "rankings": len(taus), **agreement}


def text(target: Target, built: Built, size: str, facts: Mapping[str, str], picture: str = "") -> str:
    """A target as Markdown; `facts` say what was run of each study, `picture` is the file if it has another name."""
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
    headed = (("What the numbers say", built.words), (PLANNED, target.protocol), ("What was run", run))
    parts += [f"## {head}\n\n{_bullets(lines)}" for head, lines in headed if lines]
    if built.missing:
        parts.append(f"Not there yet: {_some(built.missing)}.")
    return "\n\n".join(parts) + "\n"


def about(target: Target) -> str:
    """How to read it."""
    if target.reported is None:
        return f"Figure of the paper, drawn from our runs ({target.id})."
    if target.kind not in KINDS:
        return f"{target.reported.get('table', target.id)} of the paper, its numbers beside ours ({target.id})."
    spread = target.reported.get("spread")
    in_paper = f" ± in the paper: {spread}." if spread else ""
    table, unit = target.reported.get("table", target.id), target.reported.get("unit")
    if unit is None:
        return f"{table} of the paper. In brackets what the paper reports."
    return (
        f"{table} of the paper. Measured, mean ± sample standard deviation over seeds; in brackets what the paper "
        f"reports, in its unit ({unit}).{in_paper}"
    )


def markdown(table: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; a cell may have several lines."""
    header, *rows = table
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("\n", "<br>") for line in lines)


def what_was_run(measured: Measured, targets: Iterable[Target]) -> dict[str, str]:
    """What was run of each study of the targets, in one line."""
    used = {study for target in targets for study in target.studies}
    return {name: f"{one.what}: {_ran(measured, one)}" for name, one in measured.studies.items() if name in used}


def _ran(measured: Measured, study: studies.Study) -> str:
    runs, ends = measured.of_study(study.name), measured.ends(study.name)
    if not study.is_run and not runs:
        return f"not run at size {study.size}"
    skipped = measured.skipped(study.name)
    if skipped:
        again = f"dvc repro --force pipelines/{study.paper}/dvc.yaml:study@{study.size}-{study.name}"
        return f"not run, as its data are not there ({skipped}). Once they are: {again}"
    return what_ran(runs, study.items, ends)


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _some(missing: Sequence[str], most: int = 8) -> str:
    more = f" and {len(missing) - most} more" if len(missing) > most else ""
    return ", ".join(missing[:most]) + more


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    return cli.run(run, __doc__, arguments, "paper", "size")
