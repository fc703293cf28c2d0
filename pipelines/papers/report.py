"""Builds every table and figure of a paper from its studies at one size.

papers/built/<paper>/<size>/report/report.html holds all of them with their pictures. Each target
also has its own Markdown, CSV and PNG. The report can be made before all studies have run. It then
names the missing runs. The words are in templates/target.md.j2 and paper.md.j2.
"""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import FunctionType

import fedml_noniid
from fedml_noniid.pipelines.papers import studies, table
from fedml_noniid.pipelines.papers.described import what_ran
from fedml_noniid.pipelines.papers.runs import Measured
from fedml_noniid.pipelines.papers.studies import TITLES
from fedml_noniid.pipelines.papers.targets import Built, Target, nothing
from fedml_noniid.pipelines.reporting.pages import html_page, render
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.files import replace_folder

log = logging.getLogger(__name__)
# Every other kind is a function of papers/<paper>/figures.py, papers/curves.py or
# papers/settings.py in the checkout.
TABLE = "table"
CHECKOUT = Path(fedml_noniid.__file__).parents[1]
NO_CHECKOUT = "it is made in a checkout of the repository only"


def write(
    paper: str, size: str, root: Path, targets: Mapping[str, Target], folder: Path | None = None
) -> Path:
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
    whole = sum(not one.missing for one in built.values())
    log.info(
        "%s, size %s: %d of %d tables and figures are whole: %s",
        paper,
        size,
        whole,
        len(built),
        place,
    )
    return place


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
    return what_ran(runs, study.items, measured.diverged_items(study.name))


def build(target: Target, measured: Measured) -> Built:
    """Builds a target of any kind, with remarks on the runs that it reads.

    UserError for a kind that is no table and no function of `papers/` in the checkout.
    """
    measured.forget()
    built = builder(target)(target, measured)
    return built._replace(remarks=measured.remarks())


def builder(target: Target) -> Callable[[Target, Measured], Built]:
    """The function that builds targets of this kind.

    In an installed package, which has no pictures, a figure is said to be missing.
    """
    if target.kind == TABLE:
        return table.build
    if not (CHECKOUT / "papers" / target.paper / "figures.py").is_file():
        return lambda target, measured: nothing([NO_CHECKOUT])
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    for name in (f"papers.{target.paper}.figures", "papers.curves", "papers.settings"):
        found = getattr(importlib.import_module(name), target.kind.replace("-", "_"), None)
        if isinstance(found, FunctionType):
            return found
    allowed = f"{TABLE}, curves, settings, functions of papers/{target.paper}/figures.py"
    raise UserError(f"{target.id}: kind {target.kind!r} is unknown; allowed: {allowed}")
