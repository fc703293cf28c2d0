"""The help of every verb as text, its examples, and the errors of the command line itself."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.core import TyperGroup

from fedml_noniid.cli.app import main
from fedml_noniid.pipelines.experiment import check
from tests.pipelines.small import ROOT
from tools.pages import every_command

Path_ = tuple[str, ...]
WIDTH = 100
LOADED = (
    "torch",
    "mlflow",
    "fedml",
    "pandas",
    "grpc",
)  # each takes seconds or half a second to import


VERBS = dict(every_command())


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
    assert main(arguments) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert said.out == "" and line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.mark.parametrize("path", VERBS, ids=" ".join)
def test_every_help_teaches_by_example(path: Path_, capsys: pytest.CaptureFixture[str]) -> None:
    """A group alone shows its help."""
    is_group = isinstance(VERBS[path], TyperGroup) and not VERBS[path].invoke_without_command
    assert main([*path] if is_group else [*path, "--help"]) == 0
    said = capsys.readouterr()
    assert said.err == "" and "\x1b" not in said.out
    head, _, examples = said.out.partition("\n  Examples:\n")
    assert max(map(len, head.splitlines())) <= WIDTH
    assert " ".join(("noniid", *path)) in examples
    assert re.search(r"^  [A-Z].*?[a-z]\.", head, re.MULTILINE | re.DOTALL), "a sentence"
    assert "..." not in head.replace("[ARGS]...", ""), "the list of verbs has whole sentences"


def unknown(words: list[str]) -> str | None:
    """What `noniid` does not know of a command line, or None. Values are not checked."""
    path: Path_ = ()
    while words and (*path, words[0]) in VERBS:
        path, words = (*path, words[0]), words[1:]
    command = VERBS[path]
    if isinstance(command, TyperGroup) and words and not words[0].startswith("-"):
        return words[0]
    known = {"--help"}.union(*((*p.opts, *p.secondary_opts) for p in command.params))
    options = [word.partition("=")[0] for word in words if word.startswith("-")]
    return next((option for option in options if option not in known), None)


def test_every_example_is_a_command_line() -> None:
    found = list(examples())
    assert len(found) >= len(VERBS)
    assert [words for words in found if unknown(words)] == []


def test_help_comes_at_once() -> None:
    """No heavy library is imported for help and for errors of the command line."""
    code = (
        "import sys\nfrom fedml_noniid.cli.app import main\n"
        "words = (['--help'], ['--version'], ['run', '--help'], ['rnu'])\n"
        "codes = [*map(main, words)]\n"
        f"assert codes == [0, 0, 0, 2], codes\nsys.exit(','.join(set({LOADED}) & "
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
        ("table --root tests", "answer.txt: is missing; `noniid run` makes the report"),
        ("ui --port http", "invalid value for '--port': Input should be a valid integer"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.chdir(ROOT)
    assert said in one_line(capsys, *words.split())


@pytest.mark.parametrize(
    "verb", ["check", "partition", "run", "tune", "choose", "leave-one-out", "sync"]
)
def test_without_an_experiment_a_verb_says_so_and_writes_nothing(
    verb: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    said = f"{tmp_path}/params.yaml: is missing; `noniid init` makes the folder of an experiment"
    assert one_line(capsys, verb) == said
    assert not [*tmp_path.iterdir()]


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
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    assert one_line(capsys, "check").startswith("the working folder was removed; allowed: ")
