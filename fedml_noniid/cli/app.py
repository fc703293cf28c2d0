"""`noniid VERB`: all verbs, and the edge of the process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

import fedml_noniid
from fedml_noniid.cli import cluster, deploy, experiment, init, methods, new, tracking
from fedml_noniid.cli.verb import group, message_of
from fedml_noniid.core.errors import UserError
from fedml_noniid.pipelines import edge

try:
    from typer.exceptions import TyperException
except ImportError:  # FedML 0.9.6 needs typer 0.9, whose errors are click's
    from click import ClickException as TyperException  # type: ignore[assignment]  # only one is

EXAMPLES = (
    "noniid init --data patients.csv --label diagnosis --owner hospital",
    "noniid partition",
    "noniid run",
)
NO_TELEMETRY = (
    "MLFLOW_DISABLE_TELEMETRY",
    "DO_NOT_TRACK",
)  # libraries send no reports of their use
# typer makes its --install-completion and --show-completion options for the outermost group only.
app = group(
    "Federated learning on non-IID data: compare methods on your own data or on the papers' data "
    "sets.",
    *EXAMPLES,
    completes=True,
)
for module in (init, experiment, methods, new, deploy, cluster, tracking):
    module.add(app)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"noniid {fedml_noniid.__version__}")
        raise typer.Exit


@app.callback()
def _noniid(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Has the options of the command itself."""


def main(
    arguments: Sequence[str] | None = None, verbs: typer.Typer = app, name: str = "noniid"
) -> int:
    """Runs a command line, by default that of this process.

    Returns the exit code; errors are lines on stderr.
    """
    for variable in NO_TELEMETRY:
        os.environ.setdefault(variable, "true")
    return edge.guarded(lambda: _run(arguments, verbs, name))


def _run(arguments: Sequence[str] | None, verbs: typer.Typer, name: str) -> int:
    command = typer.main.get_command(verbs)
    try:
        here = Path.cwd()
    except FileNotFoundError:
        raise UserError("the working folder was removed; allowed: one that there is") from None
    try:
        with contextlib.chdir(here):  # --root leaves it
            code = command.main(arguments, prog_name=name, standalone_mode=False)
    except TyperException as error:
        raise UserError(message_of(error)) from None
    except typer.Abort:
        raise KeyboardInterrupt from None
    if code == edge.INTERRUPTED:  # as typer tells it
        raise KeyboardInterrupt
    return int(code or 0)
