"""docs/own_method.md is run as it stands: its package, its tests, its commands."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from fedml_noniid.plugins import registry
from tests import own_package

pytest.importorskip("typer", reason="the command comes with the pipeline")

from fedml_noniid.cli.app import main

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "own_method.md").read_text()
COMPONENT, BY_HAND, CASE, PYTHON = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
NEW, CERTIFY = re.findall(r"```bash\n(.*?)\n```", PAGE, flags=re.DOTALL)
(PARAMS,) = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)


def ran(words: list[str], folder: Path) -> str:
    """What a program of Python prints; it has to succeed."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"}
    made = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the package after the steps of the page."""
    place = tmp_path_factory.mktemp("page")
    program, *words = shlex.split(NEW)
    with contextlib.chdir(place):
        assert program == "noniid" and main(words) == 0
    folder = place / "feddisco"
    (folder / "feddisco" / "algorithm.py").write_text(COMPONENT)
    (folder / "tests" / "test_by_hand.py").write_text(BY_HAND)
    test = folder / "tests" / "test_contract.py"
    text, changed = re.subn(r"^CASE = .*\n", CASE, test.read_text(), flags=re.MULTILINE)
    assert changed == 1
    test.write_text(text)
    return folder


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_its_test_by_hand_passes(
    package: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(package))
    names: dict[str, Any] = {}
    exec(compile(BY_HAND, "by_hand.py", "exec"), names)
    names["test_one_round"](engine)
    own_package.forget("feddisco")


@pytest.mark.slow
def test_all_its_tests_pass(package: Path) -> None:
    said = ran(["-m", "pytest", "-p", "no:cacheprovider", "tests"], package)
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None and int(passed[1]) >= 24, said


def test_its_command_prints_a_certificate(package: Path) -> None:
    """Some of the checks."""
    program, *words = shlex.split(CERTIFY.replace("\\\n", ""))
    assert program == "pytest"
    plugin = ["-p", "fedml_noniid.contract.plugin", "-p", "no:cacheprovider"]
    said = ran(["-m", "pytest", *plugin, *words, "-k", "entry or neutral or needs"], package)
    assert "Certificate of feddisco (feddisco.algorithm.FedDisco)" in said
    assert "neutral: a=0, b=0" in said and "holds (4):" in said


def test_its_python_runs_and_its_settings_are_taken(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(package))
    names: dict[str, Any] = {}
    exec(compile(PYTHON, "page.py", "exec"), names)
    assert names["result"].recipe == "scaffold+feddisco"
    entries = YAML(typ="safe").load(PARAMS)
    assert entries["recipe_names"] == [*entries["recipes"]]
    entry = entries["recipes"]["mine"]
    registry.check_settings(entry.pop("recipe"), entry)
    own_package.forget("feddisco")
