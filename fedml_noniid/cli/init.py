"""The verb init."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedml_noniid.cli.verb import WORDS, verb
from fedml_noniid.pipelines import edge
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.checks import known

if TYPE_CHECKING:
    from fedml_noniid.pipelines.tools.init import StudyOptions
    from fedml_noniid.plugins.data.readers.frames import UndecidedError

KINDS = {"--table": "table", "--text": "text", "--images": "image_folder", "--arrays": "arrays"}
USUAL = ("label", "class", "target", "y")  # names of the column of the class
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
    kind, source = "digits" if data is None else known("data set", data, study.names("data")), None
    if named and named[0] in KINDS:
        kind, source = KINDS[named[0]], given[named[0]]
    elif not named and asks:
        kind, source = _ask_data()
    taken = {"--label": label, "--owner": owner, "--text-column": text_column}
    options: dict[str, object] = dict(_columns(kind, source, taken, asks))
    there = study.columns(source) if kind == "table" and source is not None else ()
    if missing is not None:
        if kind != "table":
            raise UserError(f"--missing={missing!r} is refused; allowed: with --table")
        options["missing"] = missing
    for key, columns in (("features", features), ("one_hot", one_hot), ("drop", drop)):
        if columns is not None and kind != "table":
            given_as = ",".join(columns)
            raise UserError(
                f"--{key.replace('_', '-')}={given_as!r} is refused; allowed: with --table"
            )
        options |= {} if columns is None else {key: _listed(columns, there)}
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
    if asks:
        wanted = _ask_rest(wanted, {"methods": methods, "rounds": rounds, "seeds": seeds})
    try:
        params, notes = study.planned(folder, wanted)
    except UndecidedError as error:
        edge.tell(error)
        sys.stderr.write(_advised(context.meta[WORDS], wanted, error))
        raise typer.Exit(edge.WRONG_INPUT) from None
    study.make(folder, params, deploy)
    for note in notes:
        typer.echo(f"note: {note}")
    typer.echo(
        NEXT.format(folder=folder.resolve(), there="" if folder == Path() else ", in that folder")
    )


def _advised(words: Sequence[str], wanted: StudyOptions, error: UndecidedError) -> str:
    """The same command with a decision for each column, to paste; "" if an error is about something
    else."""
    from fedml_noniid.plugins.data.readers.frames import ColumnError

    options = [
        (one.option, one.column)
        for one in error.errors
        if isinstance(one, ColumnError) and one.option
    ]
    if len(options) < len(error.errors):
        return ""
    more = ["--missing", "median"] if any(option == "missing" for option, _ in options) else []
    for option, column in dict.fromkeys(options):
        more += [] if option == "missing" else [f"--{option.replace('_', '-')}", column]
    for key in ("label", "owner"):  # that a name or a question has settled
        if key in wanted.options and not any(
            word.partition("=")[0] == f"--{key}" for word in words
        ):
            more += [f"--{key}", str(wanted.options[key])]
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
    kind: str, source: Path | None, taken: dict[str, str | None], asks: bool
) -> dict[str, str]:
    """The columns that the reader needs, as its options.

    UserError for an unknown one, and for one too many.
    """
    from fedml_noniid.pipelines.tools import init as study

    allowed = {
        "table": ("--label", "--owner"),
        "text": ("--label", "--owner", "--text-column"),
    }.get(kind, ())
    for option, value in taken.items():
        if value is not None and option not in allowed:
            wanted = "--text" if option == "--text-column" else "--table or --text"
            raise UserError(f"{option}={value!r} is refused; allowed: with {wanted}")
    if not allowed or source is None:
        return {}
    there = study.columns(source)
    found = {
        option: known(f"{source}: {option}", value, there)
        for option, value in taken.items()
        if value is not None
    }
    usual = {"--label": USUAL, "--text-column": ("text",), "--owner": ("",)}
    for option in allowed:
        if option in found:
            continue
        guess = next(
            (
                name
                for name in there
                if name.lower() in usual[option] and name not in found.values()
            ),
            None,
        )
        if asks:
            guess = _ask_column(
                option, [name for name in there if name not in found.values()], guess
            )
        elif guess is None and option != "--owner":
            raise UserError(
                f"{option} is missing; allowed: a column of {source}: {', '.join(there)}"
            )
        if guess is not None:
            found[option] = guess
    names = {"--label": "label", "--owner": "owner", "--text-column": "text"}
    return {names[option]: found[option] for option in names if option in found}


def _ask_data() -> tuple[str, Path | None]:
    from rich.prompt import Prompt

    kinds = {option.removeprefix("--"): kind for option, kind in KINDS.items()}
    choice = Prompt.ask("Which data", choices=["digits", *kinds], default="digits")
    if choice == "digits":
        return choice, None
    kind = kinds[choice]
    return kind, Path(Prompt.ask("Its file" if choice in ("table", "text") else "Its folder"))


def _ask_column(option: str, there: Sequence[str], guess: str | None) -> str | None:
    from rich.prompt import Prompt

    what = {
        "--label": "Column of the class",
        "--owner": "Column of the client, or -",
        "--text-column": "Column of the text",
    }[option]
    if option == "--owner":
        found = Prompt.ask(what, choices=["-", *there], default="-")
        return None if found == "-" else found
    return Prompt.ask(what, choices=list(there), default=guess or there[-1])


def _ask_rest(wanted: StudyOptions, given: dict[str, object]) -> StudyOptions:
    from rich.prompt import IntPrompt, Prompt

    from fedml_noniid.pipelines.tools import init as study

    if given["methods"] is None:
        usual = ",".join(study.FOR_TEXT if wanted.data == "text" else study.METHODS)
        wanted = replace(wanted, methods=tuple(_listed([Prompt.ask("Methods", default=usual)])))
    if given["rounds"] is None:
        wanted = replace(wanted, rounds=IntPrompt.ask("Rounds", default=wanted.rounds))
    if given["seeds"] is None:
        wanted = replace(wanted, seeds=IntPrompt.ask("Seeds", default=wanted.seeds))
    return wanted
