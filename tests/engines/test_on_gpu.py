"""Runs the checks of `python -m benchmarks gpu`, on the CPU where cheap, and on a GPU if any."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from fedml_noniid.api.process import in_turn
from fedml_noniid.engines import device as device_of
from fedml_noniid.engines.device import Gpus, be_deterministic, gpus
from tests.recipe_table import ALONE

NO_GPU = pytest.mark.skipif(not gpus().names, reason="needs a CUDA device; this machine has none")
ON_GPU = pytest.param("cuda", marks=NO_GPU)
ON_BOTH = pytest.mark.parametrize("device", ["cpu", ON_GPU])
CASES = gpu.cases()
CHEAP = [name for name in CASES if "ResNet" not in name]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    with in_turn():  # sets the process back
        be_deterministic()
        yield


@ON_BOTH
@pytest.mark.parametrize("name", CASES)
def test_a_second_run_has_the_same_bits(name: str, device: str) -> None:
    gpu.check_repeats(CASES[name], torch.device(device))


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cpu") for name in CHEAP),
        *(pytest.param(name, "cuda", marks=NO_GPU) for name in CASES),
    ],
)
def test_float32_is_near_float64_on_the_cpu(name: str, device: str) -> None:
    gpu.check_agrees(CASES[name], torch.device(device))


@ON_BOTH
def test_what_is_not_near_is_told(device: str) -> None:
    """float32 rounds, so there is an error; bf16's is 0.1."""
    with pytest.raises(AssertionError, match=r"the update's error is .*e-0[5-7] of its norm"):
        gpu.check_agrees(replace(CASES["CNN"], tolerance=1e-9), torch.device(device))


@ON_BOTH
@pytest.mark.parametrize("name", ["CNN", "CNN, side by side", "LSTM"])
def test_a_killed_run_goes_on_to_the_same_bits(name: str, device: str) -> None:
    gpu.check_resumes(CASES[name], torch.device(device))


@ON_BOTH
def test_two_processes_at_once_have_the_bits_of_one(device: str) -> None:
    gpu.check_processes("CNN", torch.device(device))


@pytest.mark.parametrize("device", [ON_GPU])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("entry", ALONE)
def test_every_method_has_the_cpus_numbers(entry: str, engine: str, device: str) -> None:
    gpu.check_recipe(entry, torch.device(device), engine)


@pytest.mark.parametrize(
    ("entry", "device"),
    [("scaffold+ccn", "cpu"), *(pytest.param(entry, "cuda", marks=NO_GPU) for entry in ALONE)],
)
def test_silos_have_the_simulations_numbers(entry: str, device: str) -> None:
    for package in ("cryptography", "yaml"):
        pytest.importorskip(package, reason="of the extra [silo]")
    gpu.check_silos(entry, torch.device(device))


def test_the_command_writes_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that fails is a line, and what the time does not allow is named."""

    def wrong() -> None:
        raise AssertionError("two\nlines")

    rows = [("bits", "CNN", wrong), ("bits", "LSTM", lambda: None)]
    job = replace(gpu.jobs(torch.device("cpu"), True)[0], clients=4, cohort=2, samples=20, test=10)
    monkeypatch.setattr(gpu, "checks", lambda *_: rows)
    monkeypatch.setattr(gpu, "jobs", lambda *_: [replace(job, name="measured")])
    asked = ["--device", "cpu", "--quick", "--to", str(tmp_path)]
    assert gpu.main(asked) == 1, "a check has failed"
    page = (tmp_path / "gpu.md").read_text()
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert "| bits | 1 | 1 |" in page and "- failed: bits, CNN: AssertionError: two lines" in page
    *_, row = content["rows"]
    seconds = row["rounds"] / row["rounds_per_s"]
    assert seconds >= 1 and row["rounds"] % job.every == 0
    assert row["steps_per_s"] == pytest.approx(row["rounds"] * 2 * 2 / seconds)  # M = S = 2
    assert row["s_for_1500_rounds"] == pytest.approx(1500 * seconds / row["rounds"])
    for limit in ("BUDGET_S", "CHECKS_S"):
        monkeypatch.setattr(gpu, limit, 0.0)
    assert gpu.main(asked) == 0
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["outcome"] for row in content["rows"]] == ["left out"] * 3


def test_without_a_gpu_the_command_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_of, "gpus", lambda: Gpus(reason="No CUDA GPUs are available"))
    assert gpu.main(["--to", str(tmp_path)]) == 2
    assert "No CUDA GPUs are available; allowed here: cpu" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]
