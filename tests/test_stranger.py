"""A package of somebody else beside the wheel of this one, in a clean environment.

It brings a data set, a partition, a network with batch norm and dropout, a method and a metric. The
simulation, also in two processes, and three silos end with the same bits.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.cli.test_new_method import built, install, ran
from tests.test_package import copy_of_checkout

STRANGER = Path(__file__).with_name("stranger")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment with our dependencies, our wheel and the stranger's."""
    folder = tmp_path_factory.mktemp("stranger")
    ran([sys.executable, "-m", "venv", "--without-pip", str(folder / "environment")], folder)
    (site,) = (folder / "environment").glob("lib/python*/site-packages")
    shared = [path for path in sys.path if path.endswith("site-packages")]
    (site / "shared.pth").write_text("\n".join([*shared, ""]))
    shutil.copytree(STRANGER, folder / "hospitals")
    for tree in (copy_of_checkout(folder / "checkout"), folder / "hospitals"):
        install(built(tree), site)
    return str(folder / "environment" / "bin" / "python")


def script(python: str, what: str, folder: Path) -> list[str]:
    """The lines that the stranger's script prints."""
    shutil.copy(STRANGER / "runs.py", folder)
    return ran([python, "runs.py", what, str(folder)], folder).splitlines()


@pytest.fixture(scope="module")
def simulated(python: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """SHA-256, accuracy and metric by sequential, in two processes, vectorized."""
    found = script(python, "simulated", tmp_path_factory.mktemp("simulated"))
    return [line.split() for line in found]


@pytest.mark.slow
def test_engines_and_processes_agree(simulated: list[list[str]]) -> None:
    sequential, workers, vectorized = simulated
    assert sequential == workers
    assert [float(x) for x in vectorized[1:]] == pytest.approx(
        [float(x) for x in sequential[1:]], abs=0.02
    )
    assert float(sequential[1]) > 0.6, "it learns: four classes"


@pytest.mark.slow
def test_three_silos_have_the_same_bits(
    python: str, simulated: list[list[str]], tmp_path: Path
) -> None:
    said = script(python, "silos", tmp_path)
    assert said[-1] == simulated[0][0]
    rows = (tmp_path / "silos" / "run" / "rounds.csv").read_text().splitlines()
    assert len(rows) == 1 + 30 and "test_least_sure" in rows[0]
