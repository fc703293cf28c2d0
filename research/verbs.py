"""What `python -m research papers` and `... claims` do. All studies share the store of finished
work with `noniid run`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from fedml_noniid.data.checks import known
from fedml_noniid.data.files import write_whole
from fedml_noniid.pipelines.experiment.workspace import Workspace
from research import committed, report
from research.claims import Claims, Named
from research.claims import of_papers as claims_of
from research.committed import Committed
from research.estimate import estimate
from research.page import PAGE, Page
from research.runs import Measured
from research.studies import PAPERS, RESULTS, TITLES, of_paper
from research.targets import SETTINGS_ONLY, Target, of_targets, paper_of
from research.verdicts import UNDECIDED

log = logging.getLogger(__name__)
DOCS = Path("docs") / "results"  # in a checkout


def targets(root: Path) -> list[tuple[str, Target]]:
    """(title of the paper, target) of every table and figure."""
    return [(TITLES[name], target) for name in PAPERS for target in of_targets(name, root).values()]


def estimated(workspace: Workspace, paper: str, size: str, name: str | None = None) -> str:
    """What is left of a paper's studies, or of those of its table or figure `name`. UserError."""
    measured = Measured(paper, size, workspace.root)
    target = of_targets(paper, workspace.root).get(name or "")
    if target is None:
        return estimate(measured, measured.studies)
    return estimate(measured, target.studies if target.is_trained else ())


def run(workspace: Workspace, paper: str, size: str) -> Path:
    """Runs the studies of a paper and builds its report. Returns the report's folder. UserError."""
    # Imported here and below: it imports mlflow, which takes seconds.
    from research.study import execute

    studies = of_paper(paper, size, workspace.root)
    for study in studies.values():
        execute(workspace, study)
    return report.write(paper, size, workspace.root, of_targets(paper, workspace.root))


def build(workspace: Workspace, name: str, size: str) -> Path:
    """Runs the studies of one table or figure, as far as it reads them, and builds it alone.

    Returns its Markdown file. UserError.
    """
    paper = paper_of(name, workspace.root)
    studies, target = of_paper(paper, size, workspace.root), of_targets(paper, workspace.root)[name]
    from research.study import execute

    for study in target.studies if target.kind != SETTINGS_ONLY else ():
        execute(workspace, studies[study], target.is_trained)
    folder = RESULTS / "single" / f"{name}-{size}"
    return report.write(paper, size, workspace.root, {name: target}, folder) / f"{name}.md"


def claims(
    workspace: Workspace,
    size: str,
    paper: str | None = None,
    name: str | None = None,
    running: bool = True,
    missing: bool = False,
) -> Path:
    """Runs the studies of the named paper's claims, or of one claim, and writes the page of all
    claims.

    `running`: False only judges what has run. `missing`: only studies of claims without committed
    numbers are run. Returns the page. UserError.
    """
    by_paper = claims_of(size, workspace.root)
    # Only size small has committed numbers.
    known_ = Committed(workspace.root / DOCS if size != "smoke" else None)
    folder = workspace.root / RESULTS / "claims" / size
    wanted = chosen(by_paper, paper, name).values()
    needed = [claim for claim in wanted if not (missing and known_.look(claim) >= 0)]
    if len(needed) < len(wanted):
        log.info("%d of %d claims have committed numbers", len(wanted) - len(needed), len(wanted))
    if running:
        commits = {other: committed.commit_of(claim.path) for other, claim in by_paper.items()}
        # Imported here: it imports mlflow, which takes seconds.
        from research.study import execute

        for other, study in dict.fromkeys((claim.paper, claim.claim.study) for claim in needed):
            claims_ = by_paper[other]
            # All claims on the study: its runs decide them too.
            begun = [claim for claim in claims_.every.values() if claim.claim.study == study]
            measured = Measured(other, size, workspace.root, claims_.studies)
            ended = {run.key for run in measured.of_study(study)}
            ended |= {*measured.diverged_items(study)}
            ended |= {item for claim in begun for item in known_.runs_of(claim)["item"]}
            committed.declare(folder, begun, commits, ended)
            plan = claims_.studies[study]
            for seeds in plan.looks or [len(plan.content["seeds"])]:
                execute(workspace, plan.until(seeds))
                if not _is_open(Page(by_paper, workspace.root, known_), begun):
                    break
    made = Page(by_paper, workspace.root, known_).files()
    for file, content in made.items():
        write_whole(folder / file, content)
    for old in {path.name for path in folder.glob("claims*")} - set(made):
        (folder / old).unlink()
    return folder / PAGE


def _is_open(page: Page, claims_: Collection[Named]) -> bool:
    """Whether more seeds could decide one of the claims."""
    ids = {claim.id for claim in claims_}
    judged = [verdict for verdict in page.every if verdict.named.id in ids]
    return any(verdict.word == UNDECIDED and not verdict.diverged for verdict in judged)


def chosen(by_paper: Mapping[str, Claims], paper: str | None, name: str | None) -> dict[str, Named]:
    """The claims of a paper, of all papers, or one of them. UserError for an unknown name."""
    if paper is not None:
        known("paper with claims", paper, by_paper)
    every: dict[str, Named] = {}
    for other, claims_ in by_paper.items():
        every |= claims_.every if paper in (None, other) else {}
    return every if name is None else {name: every[known("claim", name, every)]}
