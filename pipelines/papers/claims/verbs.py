"""What `noniid claims` does: runs the claims' studies, judges all claims, writes
papers/claims/<size>/."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.papers.claims import costs, declared, page, picture, tables, trials
from fedml_noniid.pipelines.papers.claims.published import FACTS, Published, read
from fedml_noniid.pipelines.papers.claims.spec import FILE, Claims, Named, of_paper
from fedml_noniid.pipelines.papers.claims.verdict import Verdict, adjusted, judged
from fedml_noniid.pipelines.papers.report import TITLES
from fedml_noniid.pipelines.papers.studies import PAPERS, RESULTS, folder_of
from fedml_noniid.pipelines.papers.targets.measured import Measured
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.checks import known
from fedml_noniid.plugins.data.files import write_whole

log = logging.getLogger(__name__)
PAGE = "claims.md"
COMMITTED = Path("docs") / "results"  # in a checkout


def files(size: str, root: Path) -> dict[str, Claims]:
    """The claims of every paper that has some. UserError for a bad file."""
    found = {
        paper: of_paper(paper, size, root)
        for paper in PAPERS
        if (folder_of(paper, root) / FILE).is_file()
    }
    owners: dict[str, Claims] = {}
    for claims in found.values():
        for name in (*claims.claims, *claims.whys):
            if name in owners:
                raise UserError(
                    f"{claims.path}: {name}: the ID is in {owners[name].path} too; allowed: "
                    "another one"
                )
            owners[name] = claims
    return found


def claims(
    place: Workspace,
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
    found, published = files(size, place.root), published_at(place.root, size)
    folder = place.root / RESULTS / "claims" / size
    wanted = chosen(found, paper, name).values()
    needed = [one for one in wanted if not (missing and published.has(one))]
    if len(needed) < len(wanted):
        log.info("%d of %d claims have committed numbers", len(wanted) - len(needed), len(wanted))
    if running:
        commits = {of: declared.commit_of(one.path) for of, one in found.items()}
        # Imported here: it imports mlflow, which takes seconds.
        from fedml_noniid.pipelines.papers.claims import tuned
        from fedml_noniid.pipelines.papers.study import execute

        for of, study in dict.fromkeys((one.paper, one.claim.study) for one in needed):
            own = found[of]
            # All claims on the study: its runs decide them too.
            begun = [
                one
                for one in (*own.claims.values(), *own.whys.values())
                if one.claim.study == study
            ]
            declared.declare(folder, begun, commits)
            log.info("%s %s: about %.2g CPU hours", of, study, own.hours(study))
            execute(place, tuned.settled(place, own.studies[study]))
    for file, content in files_of(found, place.root, size, published).items():
        write_whole(folder / file, content)
    return folder / PAGE


def files_of(
    found: Mapping[str, Claims], root: Path, size: str, published: Published
) -> dict[str, bytes]:
    """The page and all that lies beside it."""
    measured = {of: measured_of(one, root) for of, one in found.items()}
    verdicts, whys = (
        judged_all(found, measured, published),
        judged_all(found, measured, published, whys=True),
    )
    every = [*verdicts, *whys]
    facts = {**declared.read(root / RESULTS / "claims" / size), **published.facts}
    ran = {
        f"{of} {name}": _ran(every, published, of, name)
        or trials.words(trials.read(root, one.studies[name]))
        + page.what_was_run(one, name, measured[of])
        for of, one in found.items()
        for name in one.studies
    }
    pictures = {
        of: drawn
        for of in found
        if (drawn := picture.forest([one for one in verdicts if one.named.paper == of], TITLES[of]))
        is not None
    }
    text = page.markdown_of(verdicts, whys, found, measured, facts, ran, pictures)
    chosen = trials.section(tables.trials_of(every, measured, published))
    text += "".join(
        f"\n{section}\n" for section in (chosen, costs.section(every, found, root)) if section
    )
    tested = {one.named.id: one.named.test for one in every if not one.missing}
    known = {of: {**facts[of], "test": sha256} for of, sha256 in tested.items() if of in facts}
    named = {picture.PICTURE.format(of): drawn for of, drawn in pictures.items()}
    return {
        PAGE: text.encode(),
        "claims.html": page.html_of(text, size, named).encode(),
        **named,
        FACTS: (
            json.dumps({"claims": known, "studies": ran}, indent=1, sort_keys=True) + "\n"
        ).encode(),
        **tables.files_of(every, measured, published),
    }


def published_at(root: Path, size: str) -> Published:
    """The committed numbers of a checkout. Only size small has some."""
    return read(root / COMMITTED) if size != "smoke" else Published()


def _ran(found: Sequence[Verdict], known: Published, paper: str, study: str) -> str | None:
    """What the committed page says on a study, if the claims take its numbers from there."""
    own = [one for one in found if (one.named.paper, one.named.claim.study) == (paper, study)]
    return known.studies.get(f"{paper} {study}") if any(one.published for one in own) else None


def chosen(found: Mapping[str, Claims], paper: str | None, name: str | None) -> dict[str, Named]:
    """The claims of a paper, of all papers, or one of them. UserError for an unknown name."""
    if paper is not None:
        known("paper with claims", paper, found)
    own = [claims for of, claims in found.items() if paper in (None, of)]
    every = {
        id_: one for claims in own for id_, one in (*claims.claims.items(), *claims.whys.items())
    }
    return every if name is None else {name: every[known("claim", name, every)]}


def measured_of(claims: Claims, root: Path) -> Measured:
    """The finished runs of the claims' studies."""
    measured = Measured(claims.paper, claims.size, root)
    measured.studies = dict(claims.studies)
    return measured


def judged_all(
    found: Mapping[str, Claims],
    measured: Mapping[str, Measured],
    known: Published | None = None,
    whys: bool = False,
) -> list[Verdict]:
    """The verdicts on all claims, or on all causes (`whys`), adjusted together.

    `known`: the committed numbers.
    """
    own = {of: claims.whys if whys else claims.claims for of, claims in found.items()}
    return adjusted(
        [judged(measured[of], one, known) for of, named in own.items() for one in named.values()]
    )
