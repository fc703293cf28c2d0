"""Without an extra: every verb says in one line what to type, and the Python API runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection
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


def test_without_the_pipeline_every_verb_says_what_to_type(tmp_path: Path) -> None:
    help_ = pytest.importorskip(
        "tests.cli.test_help", reason="typer, which lists the verbs, is missing"
    )
    verbs = [
        [],
        ["--version"],
        *(list(path) for path in help_.VERBS),
        *([*path, "--help"] for path in help_.VERBS),
    ]
    assert len(verbs) > 50
    pipeline = set(extras.MODULES[extras.PIPELINE])
    found = json.loads(without(pipeline, COMMANDS, tmp_path, json.dumps(verbs)))
    line = "error: typer is not installed; type: pip install 'fedml-noniid[pipeline]'\n"
    assert [words for words, one in zip(verbs, found, strict=True) if one != [2, "", line]] == []
    assert list(tmp_path.iterdir()) == []


def test_a_silo_needs_no_pipeline_and_every_other_verb_says_what_to_type(tmp_path: Path) -> None:
    """With [silo] alone, by the examples of the help."""
    help_ = pytest.importorskip(
        "tests.cli.test_help", reason="typer, which lists the verbs, is missing"
    )
    verbs = [words for words in help_.examples() if words != ["methods"]]
    pipeline = set(extras.MODULES[extras.PIPELINE]) - {"typer"}
    stays = "from fedml_noniid.processes import launch\nlaunch.leave = lambda code: None\n"
    answers = json.loads(without(pipeline, stays + COMMANDS, tmp_path, json.dumps(verbs)))
    line = "error: dvc is not installed; type: pip install 'fedml-noniid[pipeline]'\n"
    lacking = {
        tuple(words[:2])
        for words, answer in zip(verbs, answers, strict=True)
        if answer == [2, "", line]
    }
    needed = {path for path in help_.VERBS if path[:1] in [("deploy",), ("audit",), ("methods",)]}
    needed -= {("deploy", "loopback"), ("deploy", "record")}
    assert {tuple(words[:2]) for words in verbs} - lacking == {
        path for path in needed if len(path) == 2
    }
    assert not [answer[2] for answer in answers if "Traceback" in answer[2]]
    assert (tmp_path / "kits" / "3").is_dir() and (tmp_path / "owner.pub").is_file()


def test_without_fedml_every_verb_of_a_deployment_says_what_to_type(tmp_path: Path) -> None:
    """By the examples of their help. Cutting the data takes the base package alone."""
    help_ = pytest.importorskip(
        "tests.cli.test_help", reason="typer, which lists the verbs, is missing"
    )
    verbs = [words for words in help_.examples() if words[0] in ("audit", "deploy")]
    assert {tuple(words[:2]) for words in verbs} >= {
        path for path in help_.VERBS if len(path) == 2 and path[0] in ("audit", "deploy")
    }
    verbs = [words for words in verbs if words[1] != "shards"]
    deploy = set(extras.MODULES[extras.SILO])
    found = json.loads(without(deploy, COMMANDS, tmp_path, json.dumps(verbs)))
    line = "error: cryptography is not installed; type: pip install 'fedml-noniid[silo]'"
    assert [words for words, one in zip(verbs, found, strict=True) if one[:2] != [2, ""]] == []
    assert {one[2].strip().removesuffix(" in an environment of Python 3.11") for one in found} == {
        line
    }
    assert list(tmp_path.iterdir()) == []


def test_without_dask_every_verb_of_a_cluster_says_what_to_type(tmp_path: Path) -> None:
    verbs = [
        ["run", "--cluster", "tls://127.0.0.1:8786"],
        ["cluster", "kit", "--out", "kit"],
        ["cluster", "scheduler", "--listen", "tcp://127.0.0.1:8786"],
        ["cluster", "worker", "tcp://127.0.0.1:8786"],
    ]
    pytest.importorskip("typer", reason="the command line needs [pipeline]")
    found = json.loads(without({"dask", "distributed"}, COMMANDS, tmp_path, json.dumps(verbs)))
    line = "error: dask is not installed; type: pip install 'fedml-noniid[cluster]'\n"
    assert [tuple(one) for one in found] == [(2, "", line)] * len(verbs)
    assert list(tmp_path.iterdir()) == []


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
    monkeypatch.setattr(extras, "find_spec", lambda module: None if module == "grpc" else extras)
    with pytest.raises(
        UserError, match=r"^grpc is not installed; type: pip install 'fedml-noniid\[silo\]'"
    ):
        extras.require(extras.SILO)
    extras.require(extras.SILO, "fedml")
    extras.require(extras.PIPELINE)


def test_a_typer_that_does_not_work_with_click_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedML 0.9.6 needs typer 0.9, which click 8.2 ended."""
    pytest.importorskip("typer", reason="of the extra [pipeline]")
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
