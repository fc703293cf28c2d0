"""What all verbs share: help with examples, errors in one line, names that complete."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from fedml_noniid import extras
from fedml_noniid.core.errors import UserError, known, one_line
from fedml_noniid.pipelines.experiment.workspace import Workspace

Root = Annotated[
    Path, typer.Option("--root", help="Folder of params.yaml.", show_default="this one")
]
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Group(TyperGroup):
    """A verb that has verbs of its own. Alone it shows its help, unless it does something."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Without arguments: as with --help."""
        is_whole = args or ctx.resilient_parsing or self.invoke_without_command
        return super().parse_args(ctx, args if is_whole else ["--help"])


class Verb(TyperCommand):
    """A verb that takes each option once, unless it is a list."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """UserError for an option that is there twice: the last would count in silence."""
        _, _, order = self.make_parser(ctx).parse_args(args=[*args])
        for option in order:
            if isinstance(option, TyperOption) and not option.multiple and order.count(option) > 1:
                raise UserError(f"{option.opts[0]} is there twice", allowed="once")
        return super().parse_args(ctx, args)


def group(text: str, *examples: str, completes: bool = False) -> typer.Typer:
    """A group of verbs with the help `text`. `completes`: whether it can install completion."""
    return typer.Typer(
        cls=Group,
        help=text,
        epilog=_epilog(examples),
        context_settings=SETTINGS,
        add_completion=completes,
        rich_markup_mode=None,  # boxes break paragraphs and take a third of a narrow terminal
    )


def verb(
    parent: typer.Typer, name: str, *examples: str, extra: str | None = extras.PIPELINE
) -> Callable[[Callable[..., object]], object]:
    """Makes a function a verb of a group, which needs an extra.

    The function's docstring is the help. `extra`: None, if what the function imports says it.
    """

    def add(function: Callable[..., object]) -> object:
        hints = get_type_hints(function, include_extras=True)
        function.__annotations__ = {key: _known_to_typer(hint) for key, hint in hints.items()}

        @functools.wraps(function)
        def run(*args: object, **kwargs: object) -> object:
            if extra is not None:
                extras.require(extra)
            return function(*args, **kwargs)

        first = " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())
        settings: dict[str, Any] = {"epilog": _epilog(examples), "context_settings": SETTINGS}
        return parent.command(name, cls=Verb, short_help=first, **settings)(run)

    return add


def say(text: str) -> None:
    """Prints lines. What would act on a terminal is escaped: another machine may have written it.

    Only a newline ends a line, and who puts others' text into one escapes its newlines.
    """
    sys.stdout.write("".join(f"{one_line(line)}\n" for line in text.removesuffix("\n").split("\n")))


def _known_to_typer(hint: Any) -> Any:
    """Writes X | None as Optional[X]: the typer of FedML 0.9.6 knows no other form."""
    if get_origin(hint) is Annotated:
        return Annotated[_known_to_typer(hint.__origin__), *hint.__metadata__]
    return Union[hint.__args__] if isinstance(hint, UnionType) else hint  # noqa: UP007, typer's need


def _epilog(examples: Iterable[str]) -> str:
    """The examples, one per line."""
    return "\n".join(["\b", "Examples:", *(f"  {example}" for example in examples)])


def one_of(kind: str, names: Callable[[], Iterable[str]]) -> dict[str, Any]:
    """For an argument or option that is one of some names: completion, and a check that knows the
    nearest match."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    def check(context: typer.Context, value: str | None) -> str | None:
        return value if value is None or context.resilient_parsing else known(kind, value, names())

    return {"autocompletion": complete, "callback": check}


def enter_workspace(root: Path) -> Workspace:
    """The experiment in `root`, with DVC's and MLflow's environment variables.

    `root` becomes the working folder: the paths in its settings start there. UserError if there is
    no such folder.
    """
    if not root.is_dir():
        raise UserError(f"--root {root}: there is no such folder")
    os.chdir(root)
    return Workspace.from_environment(Path(), os.environ)


def message_of(error: Any) -> str:
    """An error of the command line itself in one line: what is wrong, and what tells more."""
    context = getattr(error, "ctx", None)
    command = "noniid" if context is None else context.command_path
    message = " ".join(error.format_message().split()).rstrip(".")
    return f"{message[0].lower()}{message[1:]}; `{command} --help` shows what is allowed"
