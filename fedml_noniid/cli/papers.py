"""The verbs of the five papers: papers list, run, build."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedml_noniid.cli.cluster import Kit, OnCluster, train_on
from fedml_noniid.cli.verb import Root, group, one_of, verb, workspace
from fedml_noniid.pipelines.papers.studies import PAPERS, SIZES

Size = Annotated[
    str, typer.Option(help=f"How much is run: {', '.join(SIZES)}.", **one_of("size", lambda: SIZES))
]
Paper = Annotated[
    str,
    typer.Argument(
        metavar="PAPER", help=f"One of {', '.join(PAPERS)}.", **one_of("paper", lambda: PAPERS)
    ),
]


def add(app: typer.Typer) -> None:
    """Adds the group."""
    papers = group(
        "Make the tables and figures of the five papers.\n\nThey share finished work with "
        "`noniid run`: what was "
        "trained once is not trained again.",
        "noniid papers list",
        "noniid papers run rfedavg --size smoke",
        "noniid papers build rf-tab1",
    )
    verb(papers, "list", "noniid papers list", "noniid papers list | grep fnr")(show)
    verb(papers, "run", "noniid papers run rfedavg", "noniid papers run fnr --size small")(run)
    verb(
        papers, "build", "noniid papers build fnr-tab4", "noniid papers build rf-tab1 --size small"
    )(build)
    app.add_typer(papers, name="papers")


def show(root: Root = Path()) -> None:
    """List every table and figure with its ID."""
    place = workspace(root)
    from fedml_noniid.pipelines.papers import verbs

    for paper, target in verbs.targets(place.root):
        typer.echo(f"{target.id:<12} {paper:<24} {target.title}")


def run(
    paper: Paper,
    size: Size = SIZES[0],
    root: Root = Path(),
    cluster: OnCluster = None,
    kit: Kit = None,
) -> None:
    """Run a paper's studies and build its report.

    Size smoke tries the code in minutes, small is a smaller experiment, paper is the paper's own
    setting.
    """
    train_on(cluster, kit)
    place = workspace(root)
    from fedml_noniid.pipelines.papers import verbs

    typer.echo(f"report: {verbs.run(place, paper, size) / 'report.html'}")


def _targets() -> list[str]:
    from fedml_noniid.pipelines.papers import verbs

    return [target.id for _, target in verbs.targets(Path())]


def _complete(incomplete: str) -> list[str]:
    return [name for name in _targets() if name.startswith(incomplete)]


def build(
    name: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="A table or figure; `noniid papers list` has all.",
            autocompletion=_complete,
        ),
    ],
    size: Size = SIZES[0],
    root: Root = Path(),
    cluster: OnCluster = None,
    kit: Kit = None,
) -> None:
    """Make one table or figure, and show it.

    The studies that it needs are run first.
    """
    train_on(cluster, kit)
    place = workspace(root)
    from fedml_noniid.pipelines.papers import verbs

    page = verbs.build(place, name, size)
    typer.echo(f"\n{page.read_text()}\npage: {page}")
