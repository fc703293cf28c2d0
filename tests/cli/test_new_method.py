"""`noniid new method`: a package that is installed in a clean environment, passes its tests and has
a certificate."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fedml_noniid.cli.app import main
from tests.files import contents
from tests.pipelines.small import ROOT
from tests.test_package import BUILD, built_by

FILES = {
    "README.md",
    "pyproject.toml",
    "quickfed/__init__.py",
    "quickfed/algorithm.py",
    "tests/test_by_hand.py",
    "tests/test_contract.py",
}


def test_it_writes_a_package_and_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "method", "QuickFed"]) == 0
    before = contents(tmp_path / "quickfed")
    assert before.keys() == FILES and "pip install -e '.[test]'" in capsys.readouterr().out
    assert b"recipes: {quickfed: {quickfed: {mu: 0.1}}}" in before["README.md"]
    for text in before.values():
        assert max(map(len, text.splitlines())) <= 120 and b"{{" not in text
    shutil.rmtree(tmp_path / "quickfed" / "tests")
    assert main(["new", "method", "QuickFed", "--to", "quickfed"]) == 2
    assert "quickfed/pyproject.toml: exists, and is not replaced" in capsys.readouterr().err
    assert contents(tmp_path / "quickfed").items() < before.items()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fedx", "NAME = 'fedx' is refused; allowed: a class's name, such as FedX"),
        ("Fed-X", "NAME = 'Fed-X' is refused"),
        ("Fnr", "there is a method of that name"),
        ("FedAvg", "there is a method of that name"),
        ("Json", "Python itself has that name"),
        ("Numpy", "a module numpy is installed"),
    ],
)
def test_a_name_that_is_taken_or_none_is_one_line(
    name: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new", "method", name]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1
    assert not any(tmp_path.iterdir())


def ran(command: list[str], folder: Path, code: int = 0) -> str:
    """What a command prints, in an environment that knows nothing of this checkout."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    made = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=570, env=kept
    )
    assert made.returncode == code, made.stdout + made.stderr
    return made.stdout


@pytest.fixture
def environment(tmp_path: Path) -> tuple[str, Path]:
    """(interpreter, site-packages) of a new environment: our dependencies, and this package with
    its entry points."""
    place = tmp_path / "environment"
    ran([sys.executable, "-m", "venv", "--without-pip", str(place)], tmp_path)
    (site,) = place.glob("lib/python*/site-packages")
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (site / "shared.pth").write_text("\n".join([str(ROOT), *shared, ""]))
    # The code stays where it is. Only what an installer writes of it is made here.
    about = tmp_path / "about"
    (about / "fedml_noniid").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "fedml_noniid/__init__.py"):
        shutil.copy(ROOT / name, about / name)
    hook = "prepare_metadata_for_build_wheel"
    ran([sys.executable, "-c", BUILD, hook, str(site)], about)
    return str(place / "bin" / "python"), site


@pytest.mark.slow
def test_from_nothing_to_a_certificate_in_a_clean_environment(
    tmp_path: Path, environment: tuple[str, Path]
) -> None:
    python, site = environment
    package, empty = tmp_path / "work" / "quickfed", tmp_path / "empty"
    package.parent.mkdir()
    empty.mkdir()
    noniid = [python, "-m", "fedml_noniid"]
    ran([*noniid, "new", "method", "QuickFed"], package.parent)
    for command in ("init", "add --all", "-c user.name=a -c user.email=a@b commit -qm first"):
        ran(["git", *command.split()], package)
    with zipfile.ZipFile(built_by("build_wheel", package, package / "dist")) as archive:
        archive.extractall(site)
    assert "mu = 0.1" in ran([*noniid, "methods", "show", "quickfed"], empty)
    said = ran([python, "-m", "pytest", "-q", "-k", "by_hand or one_round or neutral"], package)
    assert "4 passed" in said, said
    options = ["--method", "quickfed", "--settings", "mu=0.5", "--neutral", "mu=0"]
    suite = [python, "-m", "pytest", "--pyargs", "fedml_noniid.contract", "-p", "no:cacheprovider"]
    said = ran([*suite, *options, "--silo-processes"], empty)
    lines = said.partition("Certificate of ")[2].splitlines()
    assert lines[0] == "quickfed (quickfed.algorithm.QuickFed)"
    assert lines[1] == "  package: quickfed 0.1.0"
    assert "holds (24):" in lines and "was not tried (2):" in lines
    assert not any(line.startswith(("does not hold", "left out")) for line in lines)
    assert "24 passed, 2 skipped" in said
    assert "--method is missing: the method's name, or its class" in ran(suite, empty, code=4)
    wrong = ran([*suite, "--method", "quickfedd"], empty, code=4)
    assert "method 'quickfedd' is unknown (did you mean 'quickfed'?)" in wrong


def test_other_runs_of_pytest_do_not_know_the_options(tmp_path: Path) -> None:
    """A plugin of pytest is loaded in every run. This one leaves others alone."""
    (tmp_path / "test_x.py").write_text("def test_x(pytestconfig): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "fedml_noniid.contract.plugin", "test_x.py"]
    how = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}}
    made = subprocess.run([*command, "--method", "fedx"], capture_output=True, text=True, **how)
    assert made.returncode == 4 and "unrecognized arguments: --method" in made.stderr
    made = subprocess.run(command, capture_output=True, text=True, **how)
    assert made.returncode == 0 and "certificate" not in made.stdout
