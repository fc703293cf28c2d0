"""The verbs of the five papers: papers list, run, build."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedml_noniid.cli.cluster import OnCluster, train_on
from fedml_noniid.cli.verb import Root, enter_workspace, group, one_of, verb
from research.studies import PAPERS, SIZES

Size = Annotated[
    str, typer.Option(help=f"How much is run: {', '.join(SIZES)}.", **one_of("size", lambda: SIZES))
]
Paper = Annotated[
    str,
    typer.Argument(
        metavar="PAPER", help=f"One of {', '.join(PAPERS)}.", **one_of("paper", lambda: PAPERS)
    ),
]

DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Only say how many trainings, hours and bytes on disk are left."
    ),
]


def add(app: typer.Typer) -> None:
    """Adds the group."""
    papers = group(
        "Make the tables and figures of the five papers.\n\nThey share finished work with "
        "`noniid run`: what was "
        "trained once is not trained again.",
        "python -m research papers list",
        "python -m research papers run rfedavg --size smoke",
        "python -m research papers build rf-tab1",
    )
    verb(
        papers,
        "list",
        "python -m research papers list",
        "python -m research papers list | grep fnr",
    )(show)
    verb(
        papers,
        "run",
        "python -m research papers run rfedavg",
        "python -m research papers run fnr --size small",
        "python -m research papers run fnr --size paper --dry-run",
    )(run)
    verb(
        papers,
        "build",
        "python -m research papers build fnr-tab4",
        "python -m research papers build rf-tab1 --size small",
    )(build)
    app.add_typer(papers, name="papers")


def show(root: Root = Path()) -> None:
    """List every table and figure with its ID."""
    workspace = enter_workspace(root)
    from research import verbs

    for paper, target in verbs.targets(workspace.root):
        typer.echo(f"{target.id:<12} {paper:<24} {target.title}")


def run(
    paper: Paper,
    size: Size = SIZES[0],
    dry_run: DryRun = False,
    root: Root = Path(),
    cluster: OnCluster = None,
) -> None:
    """Run a paper's studies and build its report.

    Size smoke tries the code in minutes, small is a smaller experiment, paper is the paper's own
    setting.
    """
    train_on(cluster)
    workspace = enter_workspace(root)
    from research import verbs

    typer.echo(verbs.estimated(workspace, paper, size))
    if not dry_run:
        typer.echo(f"report: {verbs.run(workspace, paper, size) / 'report.html'}")


def build(
    name: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="A table or figure; `python -m research papers list` has all.",
        ),
    ],
    size: Size = SIZES[0],
    dry_run: DryRun = False,
    root: Root = Path(),
    cluster: OnCluster = None,
) -> None:
    """Make one table or figure, and show it.

    The studies that it needs are run first.
    """
    train_on(cluster)
    workspace = enter_workspace(root)
    from research import verbs
    from research.targets import paper_of

    typer.echo(verbs.estimated(workspace, paper_of(name, workspace.root), size, name))
    if not dry_run:
        page = verbs.build(workspace, name, size)
        typer.echo(f"\n{page.read_text()}\npage: {page}")
