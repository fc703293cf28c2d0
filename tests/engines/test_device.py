"""Everything on a GPU: the same results as on the CPU, in both engines."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.core.data import Samples
from fedml_noniid.plugins.engines.clients import LocalTraining
from fedml_noniid.plugins.engines.run import Outcome, Schedule
from fedml_noniid.plugins.engines.simulation import Simulation
from fedml_noniid.plugins.models import build
from tests.recipe_table import ALONE

CLIENTS = [np.arange(0, 5), np.arange(5, 12), np.arange(12, 30), np.arange(30, 41)]


def run(recipe: str, settings: dict[str, dict[str, object]], engine: str, device: str) -> Outcome:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 1, 2, 4, generator=generator, dtype=torch.float64).to(device)
    y = torch.randint(0, 3, (60,), generator=generator).to(device)
    network = build("mlp", (1, 2, 4), 3, {"hidden": 4, "batch_norm": True})
    local = LocalTraining("sgd", lr=0.1, epochs=1, batch_size=4)
    test, public = Samples(x[41:50], y[41:50]), Samples(x[50:], y[50:])
    simulation = Simulation(
        recipe, settings, network, Samples(x, y), CLIENTS, test, None, public, local, Schedule(2, 3, 0), engine=engine
    )
    return simulation.run()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none")
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(("recipe", "settings"), ALONE.values(), ids=ALONE)
def test_a_gpu_gives_the_cpus_results(recipe: str, settings: dict[str, dict[str, object]], engine: str) -> None:
    cpu, gpu = run(recipe, settings, "sequential", "cpu"), run(recipe, settings, engine, "cuda")
    for key, leaf in cpu.params.items():
        torch.testing.assert_close(gpu.params[key].cpu(), leaf, rtol=1e-6, atol=1e-9)
    assert [row["bytes_up"] for row in gpu.rows] == [row["bytes_up"] for row in cpu.rows]
