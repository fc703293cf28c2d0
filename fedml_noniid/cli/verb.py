"""What all verbs share: help with examples, errors in one line, names that complete."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import ValidationError
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.plugins.core.errors import UserError, shown
from fedml_noniid.plugins.data.checks import known

Root = Annotated[
    Path, typer.Option("--root", help="Folder of params.yaml.", show_default="this one")
]
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
WORDS = "words"  # key of the words behind the verb in a context's `meta`
F = TypeVar("F", bound=Callable[..., object])


class WithExamples:
    """Help with examples: a command's `epilog` holds them, one per line."""

    def __init__(self, *args: Any, epilog: str | None = None, **others: Any) -> None:
        # typer's boxes break paragraphs in the middle and leave a third of a narrow terminal to the
        # text.
        super().__init__(*args, **others | {"rich_markup_mode": None})
        self.examples = (epilog or "").splitlines()

    def get_short_help_str(self, limit: int = 0) -> str:
        """The first sentence of the help.

        typer cuts it to `limit` characters, but a line can go on.
        """
        del limit
        sentence: str = super().get_short_help_str(sys.maxsize)  # type: ignore[misc]  # of the command
        return sentence

    def format_epilog(self, _: Any, formatter: Any) -> None:
        """The examples.

        One that is too wide goes on behind a backslash, so that it can still be copied.
        """
        if self.examples:
            with formatter.section("Examples"):
                indent = formatter.current_indent
                for example in self.examples:
                    for line in _lines(example, formatter.width - indent):
                        formatter.write(f"{'':{indent}}{line}\n")


class Verb(WithExamples, TyperCommand):
    """A verb."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """UserError for an option with one value that is given twice: typer would keep the last one
        only."""
        if not ctx.resilient_parsing:
            ctx.meta[WORDS] = list(args)
            named = self.make_parser(ctx).parse_args(list(args))[2]
            for option in named:
                single = option.param_type_name == "option" and not getattr(
                    option, "is_flag", False
                )
                if single and not getattr(option, "multiple", False) and named.count(option) > 1:
                    raise UserError(f"{option.opts[0]} is given twice; allowed: once")
        return super().parse_args(ctx, args)


class Group(WithExamples, TyperGroup):
    """A verb that has verbs of its own. Alone it shows its help."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Without arguments: as with --help."""
        return super().parse_args(ctx, args if args or ctx.resilient_parsing else ["--help"])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that is named. UserError with the nearest match for an unknown one."""
        if not ctx.resilient_parsing:
            path = " ".join(ctx.command_path.split()[1:])
            listed = [
                name for name, one in self.commands.items() if not one.hidden or name == args[0]
            ]
            known(f"verb of {path}" if path else "verb", args[0], listed)
        return super().resolve_command(ctx, args)


def group(words: str, *examples: str) -> typer.Typer:
    """A group of verbs with the help `words`."""
    return typer.Typer(
        cls=Group,
        help=words,
        epilog="\n".join(examples),
        context_settings=SETTINGS,
        add_completion=False,
    )


def verb(of: typer.Typer, name: str, *examples: str, hidden: bool = False) -> Callable[[F], F]:
    """Makes a function a verb of a group.

    The function's docstring is the help. `hidden`: not in the group's help.
    """
    return of.command(
        name, cls=Verb, epilog="\n".join(examples), context_settings=SETTINGS, hidden=hidden
    )


def one_of(kind: str, names: Callable[[], Iterable[str]]) -> dict[str, Any]:
    """For an argument or option that is one of some names: completion, and a check that knows the
    nearest match."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    def check(context: typer.Context, value: str | None) -> str | None:
        return value if value is None or context.resilient_parsing else known(kind, value, names())

    return {"autocompletion": complete, "callback": check}


def workspace(root: Path) -> Workspace:
    """The experiment in `root`, with DVC's and MLflow's environment variables.

    UserError if there is no such folder.
    """
    if not root.is_dir():
        raise UserError(f"--root {root}: there is no such folder")
    return Workspace.of(root, os.environ)


def message_of(error: TyperException) -> str:
    """An error of the command line itself in one line: what is wrong, and what is allowed."""
    # typer bundles its parser's errors without exporting them, so they are told apart by what they
    # hold.
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    option = getattr(error, "option_name", None)
    if context is not None and hasattr(error, "possibilities"):
        options = [
            name
            for one in context.command.get_params(context)
            for name in one.opts
            if name.startswith("--")
        ]
        try:
            known("option", option, options)
        except UserError as unknown:
            return str(unknown)
    if parameter is not None:
        named = parameter.param_type_name == "option"
        name = (
            parameter.opts[0]
            if named
            else (parameter.metavar or parameter.name.upper()).strip("[]")
        )
        if hasattr(error, "param_type"):
            return f"{name} is missing; needed: {' '.join((parameter.help or name).split())}"
        cause = error.__cause__
        if isinstance(cause, ValidationError):
            first = cause.errors()[0]
            allowed = first["msg"].removeprefix("Input should be ").partition(",")[0]
            return f"{name} = {shown(first['input'])} is refused; allowed: {allowed}"
        return f"{name}: {error.message}"
    usage = "" if context is None else f"; allowed: {' '.join(context.get_usage().split()[1:])}"
    what = " ".join(error.format_message().split()).rstrip(".")
    return f"{what[0].lower()}{what[1:]}{usage}"


def _lines(example: str, width: int) -> list[str]:
    """The lines of an example. A comment that does not fit beside its command stands above it."""
    if len(example) <= width:
        return [example]
    command, mark, comment = example.partition("#")
    above = textwrap.wrap(mark + comment, width, subsequent_indent="# ")
    # Two columns are for the backslash.
    parts = textwrap.wrap(
        command, width - 2, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return [*above, *(f"{part} \\" for part in parts[:-1]), parts[-1]]
