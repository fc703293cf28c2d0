"""Builds every table and figure of a paper from its studies at one size.

research/built/<paper>/<size>/report/report.html holds all of them with their pictures. Each target
also has its own Markdown, CSV and PNG. The report can be made before all studies have run. It then
names the missing runs. The words are in templates/target.md.j2 and paper.md.j2.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FunctionType

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.files import replace_folder
from fedml_noniid.pipelines.reporting.pages import html_page, render
from research import studies, table
from research.described import what_ran
from research.runs import Measured
from research.studies import TEMPLATES, TITLES
from research.targets import Built, Target

log = logging.getLogger(__name__)
# Every other kind is a function of research/papers/<paper>/figures.py, research/papers/curves.py or
# research/papers/settings.py.
TABLE = "table"


def write(
    paper: str, size: str, root: Path, targets: Mapping[str, Target], folder: Path | None = None
) -> Path:
    """Builds `targets` into `folder`, research/built/<paper>/<size>/report by default."""
    measured = Measured(paper, size, root)
    built = {name: build(target, measured) for name, target in targets.items()}
    facts = what_was_run(measured, targets.values())
    files = {
        f"{name}.{ending}": content
        for name, part in built.items()
        for ending, content in part.files.items()
    }
    sections = [(targets[name], part) for name, part in built.items()]
    title = f"{TITLES[paper]}: the paper's tables and figures, size {size}"
    context = {"title": title, "size": size, "sections": sections, "facts": facts}
    pictures = {name: content for name, content in files.items() if name.endswith(".png")}
    page = html_page(title, render("paper.md.j2", context, TEMPLATES), pictures)
    for target, part in sections:
        files[f"{target.id}.md"] = text(target, part, size, facts).encode()
    output = root / (folder or studies.RESULTS / paper / size / "report")
    replace_folder(output, files | {"report.html": page.encode()})
    whole = sum(not part.missing for part in built.values())
    log.info(
        "%s, size %s: %d of %d tables and figures are whole: %s",
        paper,
        size,
        whole,
        len(built),
        output,
    )
    return output


def text(
    target: Target, built: Built, size: str, facts: Mapping[str, str], picture: str = ""
) -> str:
    """A target as Markdown; `facts` say what was run of each study, `picture` is the file if it has
    another name."""
    context = {"target": target, "built": built, "size": size, "facts": facts}
    context |= {"picture": picture or f"{target.id}.png"}
    return render("target.md.j2", context, TEMPLATES)


def what_was_run(measured: Measured, targets: Iterable[Target]) -> dict[str, str]:
    """What was run of each study that the targets read runs of, in one line."""
    used = {study for target in targets if target.is_trained for study in target.studies}
    return {
        name: f"{study.what}: {_ran(measured, study)}"
        for name, study in measured.studies.items()
        if name in used
    }


def _ran(measured: Measured, study: studies.Study) -> str:
    runs = measured.of_study(study.name)
    if not study.is_run and not runs:
        return f"not run at size {study.size}"
    return what_ran(runs, study.items, measured.diverged_items(study.name))


def build(target: Target, measured: Measured) -> Built:
    """Builds a target of any kind, with remarks on the runs that it reads.

    UserError for a kind that is no table and no function of `research/papers`.
    """
    measured.forget()
    built = builder(target)(target, measured)
    return built._replace(remarks=measured.remarks())


def builder(target: Target) -> Callable[[Target, Measured], Built]:
    """The function that builds targets of this kind."""
    if target.kind == TABLE:
        return table.build
    for name in (
        f"research.papers.{target.paper}.figures",
        "research.papers.curves",
        "research.papers.settings",
    ):
        function = getattr(importlib.import_module(name), target.kind.replace("-", "_"), None)
        if isinstance(function, FunctionType):
            return function
    allowed = f"{TABLE}, curves, settings, functions of research/papers/{target.paper}/figures.py"
    raise UserError(f"{target.id}: kind {target.kind!r} is unknown; allowed: {allowed}")
