"""The verb on the papers' claims: claims."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from fedml_noniid.cli.cluster import OnCluster, train_on
from fedml_noniid.cli.verb import Root, enter_workspace, one_of, verb
from fedml_noniid.core.errors import UserError
from research.studies import PAPERS

SIZES = ("smoke", "small")  # those of research/claims.py, whose import takes seconds


def add(app: typer.Typer) -> None:
    """Adds the verb."""
    verb(
        app,
        "claims",
        "python -m research claims fednnnn --size smoke",
        "python -m research claims --size small --no-run    # judge what has run",
        "python -m research claims --size small --missing   # run what has no committed numbers",
        "python -m research claims ccn --size small --claim ccn-weights-move",
    )(claims)


def claims(
    paper: Annotated[
        str | None,
        typer.Argument(
            metavar="PAPER",
            help=f"One of {', '.join(PAPERS)}; all if left out.",
            **one_of("paper", lambda: PAPERS),
        ),
    ] = None,
    size: Annotated[
        str,
        typer.Option(
            help="smoke tests that all claims run; small decides them, in hours.",
            **one_of("size", lambda: SIZES),
        ),
    ] = SIZES[0],
    claim: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Only the study of this claim is run."),
    ] = None,
    run: Annotated[
        bool, typer.Option("--run/--no-run", help="Run what is missing, or judge what has run.")
    ] = True,
    missing: Annotated[
        bool,
        typer.Option(
            "--missing",
            help="Run only studies of claims without committed numbers in docs/results.",
        ),
    ] = False,
    write: Annotated[
        bool, typer.Option("--write", help="Copy the page to docs/results. Needs a checkout.")
    ] = False,
    root: Root = Path(),
    cluster: OnCluster = None,
) -> None:
    """Test the papers' claims: held, not held or undecided.

    Each claim is a sentence of a paper with a test that was written down before it ran. The page
    has all claims, so that the tests are corrected for their number. An interrupted command goes on
    from the last checkpoint.
    """
    train_on(cluster)
    workspace = enter_workspace(root)
    to = workspace.root / "docs" / "results"
    if write and size == "smoke":
        raise UserError(
            "--write with --size smoke is refused, as its verdicts prove nothing; allowed: "
            "--size small"
        )
    if write and not to.is_dir():
        raise UserError(f"--write: there is no folder {to}; allowed: in a checkout")
    from research import verbs

    page = verbs.claims(workspace, size, paper, claim, run, missing)
    typer.echo(f"page: {page}")
    if write:
        for file in sorted(page.parent.glob("claims*")):
            shutil.copy(file, to / file.name)
            typer.echo(f"written: {to / file.name}")
