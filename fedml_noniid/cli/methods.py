"""The verbs methods, methods show."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from fedml_noniid.cli.verb import group, verb


def add(app: typer.Typer) -> None:
    """Adds the group."""
    methods = group(
        "List all methods, their hyper-parameters and papers.\n\nfedavg is the empty "
        "recipe. Methods of installed packages are listed too.",
        "noniid methods",
        "noniid methods show fnr",
        "noniid methods show scaffold+fnr",
    )
    methods.callback(invoke_without_command=True)(listing)
    verb(
        methods,
        "show",
        "noniid methods show fnr --source          # with the source of the method",
        "noniid methods show scaffold+feddyn       # why a recipe is refused",
        "noniid methods show scaffold --secure-sums 3",
        "noniid methods show scaffold+fnr --config fedml_config.yaml --json",
        extra=None,
    )(show)
    app.add_typer(methods, name="methods")


def listing(context: typer.Context) -> None:
    """Shows the table of all methods."""
    from fedml_noniid.pipelines.verbs import recipes

    if context.invoked_subcommand is None:
        sys.stdout.write(recipes.listing())


def _names() -> Iterable[str]:
    from fedml_noniid.plugins import registry

    return ["fedavg", *registry.names()]


def _complete(incomplete: str) -> list[str]:
    return [name for name in _names() if name.startswith(incomplete)]


def show(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE",
            help="A method, or methods joined by +.",
            autocompletion=_complete,
        ),
    ],
    config: Annotated[
        Path | None, typer.Option(help="A whole fedml_config.yaml: its model, silos and settings.")
    ] = None,
    secure_sums: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="As train_args.secure_sums.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Only the messages, as JSON.")] = False,
    source: Annotated[bool, typer.Option("--source", help="Also the source of methods.")] = False,
) -> None:
    """Show what a recipe does, and what silos and server send each other.

    A deployment checks every message against the same names, types and shapes. They are shown for
    a small network, or for that of --config, whose server's data file must be there. A method of
    yours is named as my_package.fedx:FedX.
    """
    from fedml_noniid.pipelines.verbs import messages, recipes

    if as_json:
        text = json.dumps(messages.message_schema(recipe, config, secure_sums), indent=2) + "\n"
    else:
        text = (
            recipes.description(recipe, source) + "\n" + messages.shown(recipe, config, secure_sums)
        )
    sys.stdout.write(text)
