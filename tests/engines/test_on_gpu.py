"""Runs the checks of `python -m benchmarks gpu`, on the CPU where cheap, and on a GPU if any."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks import gpu
from fedml_noniid.api.process import in_turn
from fedml_noniid.engines.device import be_deterministic, gpus
from tests.recipe_table import ALONE

NO_GPU = pytest.mark.skipif(not gpus().names, reason="needs a CUDA device; this machine has none")
ON_GPU = pytest.param("cuda", marks=NO_GPU)
ON_BOTH = pytest.mark.parametrize("device", ["cpu", ON_GPU])
CASES = gpu.cases()
CHEAP = ["CNN, side by side", "LSTM"]

CASES_AND_DEVICES = pytest.mark.parametrize(
    ("name", "device"),
    [
        *((name, "cpu") for name in CHEAP),
        *(pytest.param(name, "cuda", marks=NO_GPU) for name in CASES),
    ],
)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    with in_turn():  # sets the process back
        be_deterministic()
        yield


@CASES_AND_DEVICES
def test_a_second_run_has_the_same_bits(name: str, device: str) -> None:
    gpu.check_repeats(CASES[name], torch.device(device))


@CASES_AND_DEVICES
def test_float32_is_near_float64_on_the_cpu(name: str, device: str) -> None:
    gpu.check_agrees(CASES[name], torch.device(device))


@ON_BOTH
def test_what_is_not_near_is_told(device: str) -> None:
    """float32 rounds, so there is an error; bf16's is 0.1."""
    with pytest.raises(AssertionError, match=r"the update's error is .*e-0[5-7] of its norm"):
        gpu.check_agrees(replace(CASES["CNN"], tolerance=1e-9), torch.device(device))


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("CNN", "cpu"),
        *(pytest.param(name, "cuda", marks=NO_GPU) for name in ("CNN", *CHEAP)),
    ],
)
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
