"""The verb init."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedml_noniid.cli.verb import verb
from fedml_noniid.pipelines import edge

if TYPE_CHECKING:
    from fedml_noniid.data.readers.frames import UndecidedError
    from fedml_noniid.pipelines.verbs.init import StudyOptions

NEXT = """\
{folder} is ready. Next{there}:
  noniid partition   # how uneven the clients' data are, before anything is trained
  noniid run         # train, evaluate, report
params.yaml has the settings; change it, then `noniid check`."""


def add(app: typer.Typer) -> None:
    """Adds the verb."""
    verb(
        app,
        "init",
        "noniid init --data patients.csv --label diagnosis --owner hospital",
        "noniid init digits --data digits --methods fedavg,scaffold+fnr --set scenario.alpha=0.1",
        "noniid init --data photos --set scenario.clients=10 --set train.rounds=50",
        "noniid init    # digits, on a laptop in a minute",
    )(init)


def _complete(incomplete: str) -> list[str]:
    from fedml_noniid.pipelines.verbs import init as study

    return [name for name in study.names() if name.startswith(incomplete)]


def init(
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Folder of the experiment.", show_default="this one"),
    ] = Path(),
    data: Annotated[
        str,
        typer.Option(
            metavar="NAME|PATH",
            help="A data set of the papers, or own data: a table (.csv, .xlsx, .parquet), a folder "
            "with train.npz, or with train/<class>/.",
            autocompletion=_complete,
        ),
    ] = "digits",
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of the class, of a table.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN", help="In place of --label: column of a number, or several (A,B)."
        ),
    ] = None,
    owner: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of the client, of a table.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of the text, for a table of texts.")
    ] = None,
    methods: Annotated[
        str | None, typer.Option(metavar="A,B+C", help="Methods to compare, joined by commas.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any setting of params.yaml: train.rounds=50, seeds=[0,1], scenario.alpha=0.1, "
            "data.missing=median.",
        ),
    ] = None,
    deploy: Annotated[
        bool,
        typer.Option("--deploy", help="FedML runs one method too, as processes on this machine."),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace params.yaml and dvc.yaml.")
    ] = False,
) -> None:
    """Make the folder of an experiment: params.yaml, git and DVC.

    The data are read, and all settings are checked, before anything is written.
    """
    from fedml_noniid.data.readers import table
    from fedml_noniid.data.readers.frames import UndecidedError
    from fedml_noniid.pipelines.verbs import init as study

    study.refuse_existing(folder, force)
    named = {"text": text, "label": label, "target": target, "owner": owner}
    wanted = study.StudyOptions(
        data=data,
        columns={key: column for key, column in named.items() if column is not None},
        methods=[name.strip() for name in (methods or "").split(",") if name.strip()],
        settings=settings or (),
        deploy=deploy,
    )
    try:
        content, notes = study.planned(folder, wanted)
    except UndecidedError as error:
        edge.tell(error)
        sys.stderr.write(_advised(folder, wanted, error, force))
        raise typer.Exit(edge.WRONG_INPUT) from None
    study.make(folder, content)
    for note in notes:
        typer.echo(f"note: {table.in_brief(note)}")
    there = "" if folder == Path() else ", in that folder"
    typer.echo(NEXT.format(folder=folder.resolve(), there=there))


def _advised(folder: Path, wanted: StudyOptions, error: UndecidedError, force: bool) -> str:
    """The same command with a decision for each column, to paste; "" if an error is about something
    else, or a column was asked for that has to be left out."""
    from fedml_noniid.data.readers.frames import ColumnError
    from fedml_noniid.data.yaml_files import in_one_line
    from fedml_noniid.pipelines.verbs import init as study

    undecided = [
        column_error
        for column_error in error.errors
        if isinstance(column_error, ColumnError) and column_error.option
    ]
    dropped = {column_error.column for column_error in undecided if column_error.option == "drop"}
    section = study.keys_of(wanted.settings).get("data", {})
    data: dict[str, Any] = {"one_hot": [], "missing": None, "na": [], "drop": []}
    data |= {key: value for key, value in section.items() if value is not None}
    asked = {*data["one_hot"], *data.get("features", ())}
    if len(undecided) < len(error.errors) or dropped & asked:
        return ""
    for column_error in undecided:
        if column_error.option in ("missing", "na"):
            data["missing"] = data["missing"] or "median"
            data["na"] += [cell for cell in column_error.cells if cell not in data["na"]]
        elif column_error.option == "drop" or column_error.column not in dropped:
            data[column_error.option].append(column_error.column)
    settings = [
        *(
            setting
            for setting in wanted.settings
            if setting.partition("=")[0].partition(".")[0] != "data"
        ),
        *(
            f"data.{key}={in_one_line(value)}"
            for key, value in data.items()
            if value not in (None, [])
        ),
    ]
    command = [
        *(["noniid", "init"] if folder == Path() else ["noniid", "init", str(folder)]),
        *("--data", wanted.data),
        *(word for key, column in wanted.columns.items() for word in (f"--{key}", column)),
        *(["--methods", ",".join(wanted.methods)] if wanted.methods else []),
        *(word for setting in settings for word in ("--set", setting)),
        *(["--deploy"] * wanted.deploy + ["--force"] * force),
    ]
    return f"One decision for each, to change as you like:\n  {shlex.join(command)}\n"
