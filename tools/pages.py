"""What the site adds to its Markdown: the help of every command, and examples of docstrings as
blocks of code.

mkdocs.yml names this file as a hook of mkdocs and as an extension of griffe, which reads docstrings
for mkdocstrings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import griffe
import typer
from typer.core import TyperGroup
from typer.testing import CliRunner

from fedml_noniid.cli.app import app

# the page has it once, where the help stands in the site
MARK = "<!-- the help of every command -->"


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(words behind `noniid`, typer's command) of the command itself and of all below it, in the
    order of the help."""
    yield path, command
    if isinstance(command, TyperGroup):
        for name, below in command.commands.items():
            if not below.hidden:
                yield from commands(below, (*path, name))


def every_command() -> list[tuple[tuple[str, ...], Any]]:
    """What `commands` yields for `noniid`."""
    return list(commands(typer.main.get_command(app)))


def help_of(path: tuple[str, ...]) -> str:
    """What `noniid PATH --help` prints."""
    shown = CliRunner().invoke(app, [*path, "--help"], prog_name="noniid")
    if shown.exit_code:
        raise RuntimeError(
            f"noniid {' '.join(path)} --help ends with code {shown.exit_code}: {shown.output}"
        )
    return "\n".join(line.rstrip() for line in shown.output.strip("\n").splitlines())


def every_help() -> str:
    """Markdown: a section per command, its help as a block of text."""
    sections = [
        (
            f"{'#' * min(len(path) + 1, 3)} "
            f"noniid{''.join(f' {word}' for word in path)}\n\n```text\n{help_of(path)}\n```"
        )
        for path, _ in every_command()
    ]
    return "\n\n".join(sections)


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """mkdocs calls this with each page's text before it is rendered."""
    return (
        markdown.replace(MARK, every_help()) if page.file.src_uri == "command_line.md" else markdown
    )


def fenced(docstring: str) -> str:
    """A docstring with each example in a block of code: from a line with `>>>` to the next empty
    line."""
    example = re.compile(r"^>>> .*?(?=\n\s*\n|\Z)", re.MULTILINE | re.DOTALL)
    return example.sub(lambda matched: f"```pycon\n{matched[0]}\n```", docstring)


class Examples(griffe.Extension):
    """Makes `fenced` docstrings."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """griffe calls this with every module, class, function and attribute that it has read."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
