"""The verb init."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedml_noniid.cli.verb import WORDS, verb
from fedml_noniid.pipelines import edge
from fedml_noniid.plugins.core.errors import UserError, known

if TYPE_CHECKING:
    from fedml_noniid.pipelines.tools.init import StudyOptions
    from fedml_noniid.plugins.data.readers.frames import UndecidedError

KINDS = {"--table": "table", "--text": "text", "--images": "image_folder", "--arrays": "arrays"}
# Option of the reader -> the kinds of data that have it; all others: tables alone.
TAKEN_BY = {"label": ("table", "text"), "owner": ("table", "text"), "text": ("text",)}
# Names of columns, in lower case.
USUAL = {"label": ("label", "class", "target", "y"), "owner": (), "text": ("text",)}
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
        "noniid init --table patients.csv --label diagnosis --owner hospital",
        "noniid init study --data digits --methods fedavg,scaffold+fnr --alpha 0.1 --yes",
        "noniid init --images photos --clients 10 --rounds 50",
        "noniid init    # asks some questions",
    )(init)


def complete(what: str) -> Callable[[str], list[str]]:
    """Completes the names of data sets, partitions or models."""

    def names(incomplete: str) -> list[str]:
        from fedml_noniid.pipelines.tools import init as study

        return [name for name in study.names(what) if name.startswith(incomplete)]

    return names


def init(
    context: typer.Context,
    folder: Annotated[
        Path,
        typer.Argument(metavar="FOLDER", help="Folder of the experiment.", show_default="this one"),
    ] = Path(),
    table: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Own data: a table, .csv or .parquet.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Own data: a table with a column of text.")
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Own data: train/<class>/ and test/<class>/."),
    ] = None,
    arrays: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Own data: train.npz and test.npz.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="A data set of the papers.",
            show_default="digits",
            autocompletion=complete("data"),
        ),
    ] = None,
    label: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of the class.")
    ] = None,
    owner: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of the client.")
    ] = None,
    text_column: Annotated[
        str | None, typer.Option(metavar="COLUMN", help="Column of the text.")
    ] = None,
    features: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A,B", help="Columns of numbers, of a table.", show_default="all others"
        ),
    ] = None,
    one_hot: Annotated[
        list[str] | None, typer.Option(metavar="A,B", help="Columns of categories, of a table.")
    ] = None,
    drop: Annotated[
        list[str] | None, typer.Option(metavar="A,B", help="Columns of a table that are not used.")
    ] = None,
    missing: Annotated[
        str | None,
        typer.Option(
            metavar="HOW",
            help="Cells of a table without a value: median or mode "
            "of the training rows, or drop the rows.",
            show_default="refused",
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option(metavar="A,B+C", help="Methods to compare, joined by commas."),
    ] = None,
    partition: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How the data are divided.",
            show_default="by owner, else dirichlet",
            autocompletion=complete("partition"),
        ),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option(help="Of dirichlet: the smaller, the more uneven.", show_default="0.5"),
    ] = None,
    clients: Annotated[
        int | None,
        typer.Option(min=1, help="Number of clients.", show_default="one per owner, else up to 20"),
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help="Rounds of communication.", show_default="20")
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, help="Number of seeds: runs of everything.", show_default="3"),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The network.",
            autocompletion=complete("model"),
            show_default="one that fits the data",
        ),
    ] = None,
    deploy: Annotated[
        bool,
        typer.Option("--deploy", help="FedML runs one method too, as processes on this machine."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace params.yaml and dvc.yaml.")
    ] = False,
) -> None:
    """Make the folder of an experiment: params.yaml, git and DVC.

    The data are read, and all settings are checked, before anything is written. On a terminal it
    asks for what the options leave open.
    """
    given = {"--table": table, "--text": text, "--images": images, "--arrays": arrays}
    named = [option for option, value in {**given, "--data": data}.items() if value is not None]
    if len(named) > 1:
        raise UserError(
            f"{' and '.join(named)} exclude each other; allowed: one of "
            f"{', '.join([*given, '--data'])}"
        )
    asks = sys.stdin.isatty() and not yes
    from fedml_noniid.pipelines.tools import init as study
    from fedml_noniid.plugins.data.readers.frames import UndecidedError

    study.refuse_existing(folder, force)
    kind = "digits" if data is None else known("data set", data, study.names("data"))
    source = next((path for path in given.values() if path is not None), None)
    if source is not None:
        kind = KINDS[named[0]]
    elif asks and not named:
        kind, source = _ask_data()
    options: dict[str, Any] = {"label": label, "owner": owner, "text": text_column}
    options |= {"missing": missing, "features": features, "one_hot": one_hot, "drop": drop}
    options = {key: value for key, value in options.items() if value is not None}
    for key, value in options.items():
        if kind not in TAKEN_BY.get(key, ("table",)):
            shown = repr(",".join(value) if isinstance(value, list) else value)
            allowed = " or ".join(f"--{one}" for one in TAKEN_BY.get(key, ("table",)))
            raise UserError(f"{_option(key)}={shown} is refused; allowed: with {allowed}")
    if source is not None and kind in ("table", "text"):
        there = study.columns(source)
        options = _columns(kind, source, there, options, asks)
        for key in ("features", "one_hot", "drop"):
            if key in options:
                options[key] = _listed(options[key], there)
    if asks:
        from rich.prompt import IntPrompt, Prompt

        fitting = ",".join(study.FOR_TEXT if kind == "text" else study.METHODS)
        methods = methods or [Prompt.ask("Methods", default=fitting)]
        rounds = rounds or IntPrompt.ask("Rounds", default=20)
        seeds = seeds or IntPrompt.ask("Seeds", default=3)
    wanted = study.StudyOptions(
        data=kind,
        source=source,
        options=options,
        partition=partition,
        alpha=alpha,
        clients=clients,
        rounds=rounds or 20,
        seeds=seeds or 3,
        model=model,
        deploy=deploy,
        methods=None if methods is None else tuple(_listed(methods)),
    )
    try:
        params, notes = study.planned(folder, wanted)
    except UndecidedError as error:
        edge.tell(error)
        sys.stderr.write(_advised(context.meta[WORDS], wanted, error))
        raise typer.Exit(edge.WRONG_INPUT) from None
    study.make(folder, params, deploy)
    for note in notes:
        typer.echo(f"note: {note}")
    where = "" if folder == Path() else ", in that folder"
    typer.echo(NEXT.format(folder=folder.resolve(), there=where))


def _option(key: str) -> str:
    """The option that gives one of the reader's options."""
    return "--text-column" if key == "text" else f"--{key.replace('_', '-')}"


def _advised(words: Sequence[str], wanted: StudyOptions, error: UndecidedError) -> str:
    """The same command with a decision for each column, to paste; "" if an error is about something
    else."""
    from fedml_noniid.plugins.data.readers.frames import ColumnError

    columns = [one for one in error.errors if isinstance(one, ColumnError) and one.option]
    if len(columns) < len(error.errors):
        return ""
    decided = [(one.option, str(one.column)) for one in columns if one.option != "missing"]
    more = [] if len(decided) == len(columns) else ["--missing", "median"]
    given = {word.partition("=")[0] for word in words}
    # A name or a question has decided about these.
    decided += [
        (key, str(value)) for key, value in wanted.options.items() if key in ("label", "owner")
    ]
    for option, column in dict.fromkeys(decided):
        if option not in ("label", "owner") or _option(option) not in given:
            more += [_option(option), column]
    return (
        "One decision for each, to change as you like:\n  "
        f"{shlex.join(['noniid', 'init', *words, *more])}\n"
    )


def _listed(values: Sequence[str], there: Sequence[str] = ()) -> list[str]:
    """The names in the values of an option, which is given once or several times; a value may hold
    names and commas.

    A name of `there` may have commas of its own.
    """
    return [
        name.strip()
        for value in values
        for name in ([value] if value in there else value.split(","))
    ]


def _columns(
    kind: str, source: Path, there: Sequence[str], given: dict[str, Any], asks: bool
) -> dict[str, Any]:
    """The reader's options, with the columns that it needs.

    UserError for an unknown column, and for one that is missing.
    """
    found: dict[str, Any] = {}
    for key in ("label", "owner", "text"):
        if kind not in TAKEN_BY[key]:
            continue
        free = [name for name in there if name not in found.values()]
        guess = next((name for name in free if name.lower() in USUAL[key]), None)
        if key in given:
            guess = known(f"{source}: {_option(key)}", given[key], there)
        elif asks:
            guess = _ask_column(key, free, guess)
        elif guess is None and key != "owner":
            raise UserError(
                f"{_option(key)} is missing; allowed: a column of {source}: {', '.join(there)}"
            )
        if guess is not None:
            found[key] = guess
    return found | {key: value for key, value in given.items() if key not in found}


def _ask_data() -> tuple[str, Path | None]:
    from rich.prompt import Prompt

    kinds = {option.removeprefix("--"): kind for option, kind in KINDS.items()}
    choice = Prompt.ask("Which data", choices=["digits", *kinds], default="digits")
    if choice == "digits":
        return choice, None
    what = "Its file" if choice in ("table", "text") else "Its folder"
    return kinds[choice], Path(Prompt.ask(what))


def _ask_column(key: str, free: Sequence[str], guess: str | None) -> str | None:
    from rich.prompt import Prompt

    none = ["-"] if key == "owner" else []
    what = {"label": "class", "owner": "client, or -", "text": "text"}[key]
    default = none[0] if none else guess or free[-1]
    found = Prompt.ask(f"Column of the {what}", choices=[*none, *free], default=default)
    return None if found in none else found
