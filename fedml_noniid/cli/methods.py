"""The verb methods."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Annotated

import typer

from fedml_noniid.cli.verb import verb


def add(app: typer.Typer) -> None:
    """Adds the verb."""
    verb(
        app,
        "methods",
        "noniid methods",
        "noniid methods fnr               # one method: equations, options, source",
        "noniid methods scaffold+feddyn   # what a recipe does, or why it is refused",
    )(methods)


def _names() -> Iterable[str]:
    from fedml_noniid.plugins import recipes

    return ["fedavg", *recipes.names()]


def _complete(incomplete: str) -> list[str]:
    return [name for name in _names() if name.startswith(incomplete)]


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME|RECIPE",
            help="A method, or methods joined by +.",
            autocompletion=_complete,
        ),
    ] = None,
) -> None:
    """Show all methods, one method in full, or what a recipe does.

    The list has each method's hyper-parameters, their defaults, and the paper. fedavg is the empty
    recipe. Methods of installed packages are in it too; a dotted path such as
    my_package.fedx.FedX names any other.
    """
    from fedml_noniid.pipelines.tools import recipes as shown

    if name is None:
        sys.stdout.write(shown.listing())
    else:
        sys.stdout.write(shown.one(name))
