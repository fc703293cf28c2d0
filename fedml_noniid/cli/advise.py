"""The verb advise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedml_noniid.cli.checkout import RESULTS, checkout
from fedml_noniid.cli.verb import Root, verb, workspace
from fedml_noniid.plugins.core.errors import UserError


def add(app: typer.Typer) -> None:
    """Adds the verb."""
    verb(
        app,
        "advise",
        "noniid advise    # which method for the scenarios of params.yaml?",
        "noniid advise --root ../other-study",
        "noniid advise --make-base --study digits",
        "noniid advise --make-base --no-run    # judge what has run",
    )(advise)


def _studies(incomplete: str) -> list[str]:
    from fedml_noniid.pipelines.tools import advice

    return [name for name in advice.study_names() if name.startswith(incomplete)]


def advise(
    make_base: Annotated[
        bool,
        typer.Option(
            "--make-base", help="Run the studies of the base instead (90 min). Needs a checkout."
        ),
    ] = False,
    study: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="With --make-base: only this study.", autocompletion=_studies
        ),
    ] = None,
    run: Annotated[
        bool,
        typer.Option(
            "--run/--no-run", help="With --make-base: run what is missing, or take what has run."
        ),
    ] = True,
    to: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="With --make-base: where the files go.",
            show_default="docs/results",
        ),
    ] = None,
    root: Root = Path(),
) -> None:
    """Say which method to use, before anything is trained.

    The skew of each scenario in params.yaml is measured on its partitions, which are made if they
    are missing. Methods are ranked by the gain over FedAvg that they had in runs with skew like
    that. The answer can be "don't know".
    """
    given = {"--study": study is not None, "--no-run": not run, "--to": to is not None}
    alone = [option for option, is_given in given.items() if is_given]
    if alone and not make_base:
        raise UserError(f"{', '.join(alone)} is refused; allowed: with --make-base")
    if make_base:
        folder = (to or checkout("advise --make-base") / RESULTS).resolve()
        place = workspace(root)
        from fedml_noniid.pipelines.tools import advice

        advice.make(place, folder, study, run)
        return
    place = workspace(root)
    from fedml_noniid.pipelines.tools import advice, repro

    code = repro.repro(place, "partition")
    if code:
        raise typer.Exit(code)
    typer.echo(f"\n{advice.text(place.root)}")
