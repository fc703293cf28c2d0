"""The verb new method."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedml_noniid.cli.verb import group, verb

NEXT = """\
Next, in {folder}:
  pip install -e '.[test]'
  pytest                   # the test by hand, and the contract
  noniid methods show {package}
Then put your paper's equations into {package}/algorithm.py."""


def add(app: typer.Typer) -> None:
    """Adds the group."""
    new = group(
        "Write the beginnings of a package of your own.",
        "noniid new method FedX",
        "noniid new method FedX --to packages/fedx",
    )
    examples = ("noniid new method FedX", "noniid new method FedX --to packages/fedx")
    verb(new, "method", *examples)(method)
    app.add_typer(new, name="new")


def method(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The method's class, such as FedX.")],
    to: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder to write.", show_default="name in lower case"),
    ] = None,
) -> None:
    """Write a package with a method: component, entry point, tests, README.

    The method is true and small, and passes the contract. Nothing is replaced.
    """
    from fedml_noniid.pipelines.verbs import new_method

    paths = new_method.write(name, to)
    for path in paths:
        typer.echo(path)
    folder = paths[0].parent.resolve()
    typer.echo(NEXT.format(folder=folder, package=name.lower()))
