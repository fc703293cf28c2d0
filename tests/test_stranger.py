"""A package of somebody else beside the wheel of this one, in a clean environment.

It brings a data set, a partition, a network with batch norm and dropout, a method and a metric. The
simulation, also in two processes and after a kill, and three silos of which some are killed, end
with the same bits.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.test_new_method import built, install, ran
from tests.test_package import copy_of_checkout

STRANGER = Path(__file__).with_name("stranger")
PARAMS = """\
experiment: hospitals
data: {name: "hospitals.data:scans", root: ., validation: 0.0, public: 0}
scenario_names: [hospitals]
scenarios: {hospitals: {partition: "hospitals.data:by_hospital", clients: 3, share: 0.9}}
recipe_names: [mine]
recipes: {mine: {recipe: fedprox+fedmean, fedmean: {mu: 0.3}}}
seeds: [0]
train:
  {model: "hospitals.network:GatedNet", model_options: {p: 0.3}, rounds: 30, epochs: 1,
   batch_size: 16, lr: 0.05, engine: sequential,
   metrics: {hospitals.metric.sureness: {power: 2.0}}}
machine: {checkpoint_every: 1, processes: 1}
"""
DEADLINE_S = 120.0


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
def test_three_silos_have_the_same_bits_though_two_processes_are_killed(
    python: str, simulated: list[list[str]], tmp_path: Path
) -> None:
    said = script(python, "silos", tmp_path)
    lines = [line for line in said if not line.startswith(("round ", "weights "))]
    assert lines == ["killed 1", "killed 0", "ended 0 0 0 0", simulated[0][0]]
    rows = (tmp_path / "silos" / "run" / "rounds.csv").read_text().splitlines()
    assert len(rows) == 1 + 30 and "test_least_sure" in rows[0]


@pytest.mark.slow
def test_a_killed_study_goes_on_to_the_same_bits(
    python: str, simulated: list[list[str]], tmp_path: Path
) -> None:
    (tmp_path / "params.yaml").write_text(PARAMS)
    stage = [python, "-m", "fedml_noniid.pipelines.stages"]
    assert "is right" in ran([python, "-m", "fedml_noniid", "check"], tmp_path)
    for name in ("prepare", "partition"):
        ran([*stage, name], tmp_path)
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    process = subprocess.Popen([*stage, "train"], cwd=tmp_path, env=kept, start_new_session=True)
    end = time.monotonic() + DEADLINE_S
    while not (checkpoints := [*tmp_path.glob(".resume/*/checkpoint.safetensors")]):
        assert process.poll() is None and time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert checkpoints and not [*tmp_path.glob("runs/*")], "it was killed in its middle"
    for name in ("train", "evaluate"):
        ran([*stage, name], tmp_path)
    run = json.loads((tmp_path / "runs" / "hospitals-mine-0" / "run.json").read_text())
    assert run["weights_sha256"] == simulated[0][0]
    assert run["final"]["test_sure"] == float(simulated[0][2])
    assert sorted(run["params"]["own_code"]) == [
        "fedmean",
        "hospitals.metric.sureness",
        "hospitals.network:GatedNet",
    ]
