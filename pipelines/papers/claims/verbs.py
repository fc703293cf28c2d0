"""What `noniid claims` does: runs the claims' studies, judges all claims, writes papers/claims/<size>/."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.papers.claims import declared, page
from fedml_noniid.pipelines.papers.claims.spec import FILE, Claims, Named, of_paper
from fedml_noniid.pipelines.papers.claims.verdict import Verdict, adjusted, judged
from fedml_noniid.pipelines.papers.studies import PAPERS, RESULTS, folder_of
from fedml_noniid.pipelines.papers.targets.measured import Measured
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.checks import known
from fedml_noniid.plugins.data.files import write_whole

log = logging.getLogger(__name__)


def files(size: str, root: Path) -> dict[str, Claims]:
    """The claims of every paper that has some. UserError for a bad file."""
    found = {paper: of_paper(paper, size, root) for paper in PAPERS if (folder_of(paper, root) / FILE).is_file()}
    owners: dict[str, Claims] = {}
    for claims in found.values():
        for name in claims.claims:
            if name in owners:
                raise UserError(f"{claims.path}: {name}: the ID is in {owners[name].path} too; allowed: another one")
            owners[name] = claims
    return found


def claims(
    place: Workspace, size: str, paper: str | None = None, name: str | None = None, running: bool = True
) -> Path:
    """Runs the studies of the named paper's claims, or of one claim, and writes the page of all claims.

    `running`: False only judges what has run. Returns the page. UserError.
    """
    found = files(size, place.root)
    folder = place.root / RESULTS / "claims" / size
    wanted = chosen(found, paper, name)
    if running:
        commits = {of: declared.commit_of(one.path) for of, one in found.items()}
        declared.declare(folder, wanted.values(), commits)
        # Imported here: it imports mlflow, which takes seconds.
        from fedml_noniid.pipelines.papers.study import execute

        for of, study in dict.fromkeys((one.paper, one.claim.study) for one in wanted.values()):
            own = found[of]
            log.info("%s %s: about %.2g CPU hours", of, study, own.hours(study))
            execute(place, own.studies[study])
    measured = {of: measured_of(one, place.root) for of, one in found.items()}
    verdicts = judged_all(found, measured)
    files_ = {
        "claims.md": page.markdown_of(verdicts, found, measured, declared.read(folder)).encode(),
        "claims.csv": page.numbers_of(verdicts),
        "claims-runs.csv": page.runs_of(verdicts),
    }
    for file, content in files_.items():
        write_whole(folder / file, content)
    return folder / "claims.md"


def chosen(found: Mapping[str, Claims], paper: str | None, name: str | None) -> dict[str, Named]:
    """The claims of a paper, of all papers, or one of them. UserError for an unknown name."""
    if paper is not None:
        known("paper with claims", paper, found)
    own = [claims for of, claims in found.items() if paper in (None, of)]
    every = {id_: one for claims in own for id_, one in claims.claims.items()}
    return every if name is None else {name: every[known("claim", name, every)]}


def measured_of(claims: Claims, root: Path) -> Measured:
    """The finished runs of the claims' studies."""
    measured = Measured(claims.paper, claims.size, root)
    measured.studies = dict(claims.studies)
    return measured


def judged_all(found: Mapping[str, Claims], measured: Mapping[str, Measured]) -> list[Verdict]:
    """The verdicts on all claims, adjusted together."""
    return adjusted([judged(measured[of], one) for of, claims in found.items() for one in claims.claims.values()])
