"""The help of every verb as text, its examples, and the errors of the command line itself."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperGroup

import fedml_noniid
from fedml_noniid.cli.app import app, main
from fedml_noniid.pipelines.experiment import check
from tests.pipelines.small import ROOT

Path_ = tuple[str, ...]
WIDTH = 100
LOADED = (
    "torch",
    "mlflow",
    "fedml",
    "pandas",
    "grpc",
)  # each takes seconds or half a second to import


def walk(command: Any, path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """(words behind `noniid`, command) of every group and verb."""
    yield path, command
    if isinstance(command, TyperGroup):
        for name, below in command.commands.items():
            yield from walk(below, (*path, name))


VERBS = dict(walk(typer.main.get_command(app)))


def examples() -> Iterator[list[str]]:
    """The words behind `noniid` of each command line in the examples; comments and other programs
    are left out."""
    for verb in VERBS.values():
        for line in verb.epilog.splitlines():
            for command in re.split(r" && | \| ", line):
                words = shlex.split(command, comments=True)
                if "noniid" in words:  # behind variables of the environment
                    yield words[words.index("noniid") + 1 :]


def one_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command that ends with 2 and shows nothing."""
    capsys.readouterr()
    assert main(arguments) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert said.out == "" and line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_every_help_teaches_by_example(path: Path_, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*path, "--help"]) == 0
    said = capsys.readouterr()
    assert said.err == "" and "\x1b" not in said.out
    head, _, examples = said.out.partition("\n  Examples:\n")
    assert max(map(len, head.splitlines())) <= WIDTH
    assert examples.splitlines()
    assert " ".join(("noniid", *path)) in examples
    assert re.search(r"^  [A-Z].*?[a-z]\.", head, re.MULTILINE | re.DOTALL), (
        "a sentence that says what it does"
    )
    assert "..." not in head.replace("[ARGS]...", ""), "the list of verbs has whole sentences"


def test_every_example_is_a_command_line() -> None:
    """Its verb exists, and the verb's own parser takes its arguments. Nothing is run."""
    found = list(examples())
    assert len(found) >= len(VERBS)
    for words in found:
        path: Path_ = ()
        left = list(words)
        while left and (*path, left[0]) in VERBS:
            path, left = (*path, left[0]), left[1:]
        command = VERBS[path]
        assert not isinstance(command, TyperGroup) or command.invoke_without_command, words
        context = command.make_context("noniid", left, resilient_parsing=True)
        assert not context.args, words
        assert not [
            one.name for one in command.params if one.required and context.params[one.name] is None
        ], words


@pytest.mark.parametrize(
    "path",
    [
        path
        for path, verb in VERBS.items()
        if isinstance(verb, TyperGroup) and not verb.invoke_without_command
    ],
    ids=" ".join,
)
def test_a_group_alone_shows_its_help(path: Path_, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(list(path)) == 0
    alone = capsys.readouterr().out
    assert main([*path, "--help"]) == 0
    assert alone == capsys.readouterr().out and all(name in alone for name in VERBS[path].commands)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"noniid {fedml_noniid.__version__}\n"


def test_help_comes_at_once() -> None:
    """No heavy library is imported for help and for errors of the command line."""
    code = (
        "import sys\nfrom fedml_noniid.cli.app import main\n"
        "codes = [main(words) for words in (['--help'], ['run', '--help'], ['rnu'])]\n"
        f"assert codes == [0, 0, 2], codes\nsys.exit(','.join(set({LOADED}) & "
        "set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("rnu", "no such command 'rnu'. Did you mean 'run'?; `noniid --help` shows what is"),
        ("deploy sevrer", "Did you mean 'server'?; `noniid deploy --help` shows what is allowed"),
        (
            "check --rot x",
            "no such option: --rot (Possible options: --root); `noniid check --help`",
        ),
        ("run trian", "stage 'trian' is unknown (did you mean 'train'?); allowed: plan, prepare"),
        (
            "run train evaluate",
            "got unexpected extra argument(s) (evaluate); `noniid run --help` shows what",
        ),
        ("methods show fnrr", "method 'fnrr' is unknown (did you mean 'fnr'?)"),
        (
            "deploy silo --rank x --config c",
            "invalid value for '--rank': Input should be a valid integer",
        ),
        ("deploy silo --config c", "missing option '--rank'"),
        (
            "deploy status --config nowhere.yaml",
            "nowhere.yaml: can't be read (No such file or directory)",
        ),
        (
            "deploy config pyproject.toml",
            "pyproject.toml: exists; allowed: another path, or --force to replace it",
        ),
        ("check --root /nowhere", "--root /nowhere: there is no such folder"),
        (
            "check --root tests",
            "params.yaml: can't be read (No such file or directory); it belongs into ",
        ),
        (
            "run --root tests",
            "params.yaml: is missing; `noniid init` makes the folder of an experiment",
        ),
        ("table --root tests", "answer.txt: is missing; `noniid run` makes the report"),
        ("ui --port http", "invalid value for '--port': Input should be a valid integer"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.chdir(ROOT)
    assert said in one_line(capsys, *words.split())


def test_an_interrupt_ends_with_130_and_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "check", interrupted)
    assert main(["check", "--root", str(ROOT)]) == 130
    assert capsys.readouterr().err == "interrupted; the same command goes on from here\n"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("noniid pa", {"partition"}),
        ("noniid deploy s", {"shards", "server", "silo", "status", "study"}),
        ("noniid run e", {"evaluate"}),
        ("noniid methods show fedno", {"fednova"}),
        ("noniid init --data cifar1", {"cifar10", "cifar100"}),
    ],
)
def test_names_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, found: set[str]
) -> None:
    """What bash gets for these words with the cursor at their end."""
    before, _, cursor = words.rpartition(" ")
    monkeypatch.setenv("_NONIID_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(before.split())))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert set(capsys.readouterr().out.split()) == found, cursor


def test_a_working_folder_that_was_removed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["check"]) == 2
    assert capsys.readouterr().err.startswith("error: the working folder was removed; allowed: ")
