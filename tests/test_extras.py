"""Without an extra: every verb says in one line what to type, and the Python API runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Sequence
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from fedml_noniid import extras
from fedml_noniid.core.errors import UserError
from tests.pipelines.small import ROOT

ALL = {module for modules in extras.MODULES.values() for module in modules}
# Hides modules as an environment without them does, and runs a program.
PROGRAM = """
import contextlib, importlib.metadata, io, json, sys

class Rest(importlib.metadata.MetadataPathFinder):
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in {hidden!r}:
            return next(filter(None, (finder.find_spec(name, path, target) for finder in \
FINDERS)), None)

FINDERS = list(sys.meta_path)
sys.meta_path[:] = [Rest]
{program}
assert not {hidden!r} & sys.modules.keys()
"""
COMMANDS = """
from fedml_noniid.__main__ import main
found = []
for words in json.loads(sys.stdin.read()):
    sys.argv = ["noniid", *words]
    out = [io.StringIO(), io.StringIO()]
    with contextlib.redirect_stdout(out[0]), contextlib.redirect_stderr(out[1]):
        code = main()
    found.append([code, *(one.getvalue() for one in out)])
print(json.dumps(found))
"""


def without(hidden: Collection[str], program: str, folder: Path, given: str = "") -> str:
    """What a program prints where the modules `hidden` are not installed."""
    made = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(hidden=set(hidden), program=program)],
        cwd=folder,
        input=given,
        text=True,
        capture_output=True,
        check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "MPLBACKEND": "agg"},
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


def examples(*verbs: str) -> list[list[str]]:
    """The examples of the help of these verbs; all without any."""
    lists = pytest.importorskip("tests.cli.test_help", reason="typer, which lists the verbs")
    return [line for line in lists.examples() if not verbs or line[0] in verbs]


@pytest.mark.parametrize(
    ("extra", "verbs", "module"),
    [
        (extras.PIPELINE, (), "typer"),
        (extras.SILO, ("audit", "deploy"), "cryptography"),
        (extras.CLUSTER, ("cluster",), "dask"),
    ],
)
def test_without_an_extra_every_verb_says_what_to_type(
    tmp_path: Path, extra: str, verbs: Sequence[str], module: str
) -> None:
    """By the examples of their help. Nothing is written. Cutting the data and the script for Slurm
    take the base package alone."""
    lines = [words for words in examples(*verbs) if {"shards", "slurm"}.isdisjoint(words)]
    lines += [] if verbs else [[], ["--version"], ["run", "--help"], ["cluster"]]
    hidden = {*extras.MODULES[extra]} - ({"cryptography"} if module == "dask" else set())
    found = json.loads(without(hidden, COMMANDS, tmp_path, json.dumps(lines)))
    line = f"error: {module} is not installed; type: pip install 'fedml-noniid[{extra}]'"
    newer = " in an environment of Python 3.11"
    ended = [(code, out, err.strip().removesuffix(newer)) for code, out, err in found]
    assert {*ended} == {(2, "", line)} and list(tmp_path.iterdir()) == []


def test_a_silo_needs_no_pipeline_and_every_other_verb_says_what_to_type(tmp_path: Path) -> None:
    """With [silo] alone, by the examples of the help."""
    verbs = [words for words in examples() if words != ["methods"]]
    pipeline = set(extras.MODULES[extras.PIPELINE]) - {"typer"}
    stays = "from fedml_noniid.processes import launch\nlaunch.leave = lambda code: None\n"
    answers = json.loads(without(pipeline, stays + COMMANDS, tmp_path, json.dumps(verbs)))
    line = "error: dvc is not installed; type: pip install 'fedml-noniid[pipeline]'\n"
    works = {
        tuple(words[:2])
        for words, answer in zip(verbs, answers, strict=True)
        if answer != [2, "", line]
    }
    needed = {tuple(words[:2]) for words in examples("deploy", "audit", "methods")}
    assert works == needed - {("deploy", "loopback"), ("deploy", "record"), ("methods",)}
    assert not [answer[2] for answer in answers if "Traceback" in answer[2]]
    assert (tmp_path / "kits" / "3").is_dir() and (tmp_path / "owner.pub").is_file()


def test_the_example_of_the_readme_needs_no_extra(tmp_path: Path) -> None:
    (code,) = re.findall(
        r"\[start:python\] -->\n```python\n(.*?)```",
        (ROOT / "README.md").read_text(),
        flags=re.DOTALL,
    )
    few = "search={'seeds': [9], 'fresh': [10, 11], 'grid': {'train': {'lr': [0.1, 0.3]}}}"
    for old, new in (
        ("rounds=20", "rounds=1"),
        ("clients=20", "clients=5"),
        ("seeds=[0, 1, 2]", "seeds=[0, 1]"),
        ("nd.choose(split, recipes", f"nd.choose(split, recipes, {few}"),
    ):
        assert old in code
        code = code.replace(old, new)
    assert "scaffold+fnr" in without(ALL, code, tmp_path)


def test_what_needs_an_extra_says_so_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedML 0.9.6 needs typer 0.9, which click 8.2 ended."""
    monkeypatch.setattr(extras, "find_spec", lambda module: None if module == "grpc" else extras)
    silo = r"^grpc is not installed; type: pip install 'fedml-noniid\[silo\]'"
    with pytest.raises(UserError, match=silo):
        extras.require(extras.SILO)
    extras.require(extras.SILO, "fedml")
    installed = {"typer": "0.9.4", "click": "8.5.1"}
    monkeypatch.setattr(extras, "version", installed.__getitem__)
    with pytest.raises(UserError, match=r"^typer 0\.9\.4 .* click 8\.5\.1; .*'click<8\.2'$"):
        extras.require_command()
    for typer, click in (("0.9.4", "8.1.8"), ("0.29.2", "8.5.1"), ("0.16.0", "8.10.0")):
        installed.update(typer=typer, click=click)
        extras.require_command()


def test_modules_come_with_their_extra() -> None:
    """An extra that needs another brings its packages too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    of = packages_distributions()
    for extra, modules in extras.MODULES.items():
        listed = {re.split(r"[<>=; ]", line)[0] for line in project["optional-dependencies"][extra]}
        for module in modules:
            names = {name.lower().replace("_", "-") for name in of.get(module, listed)}
            assert names & listed, module
