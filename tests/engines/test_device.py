"""Everything on a GPU: the same results as on the CPU, in both engines."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.core.data import Samples
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.engines.federation import Federation
from fedml_noniid.plugins.engines.plan import LocalTraining, Plan
from fedml_noniid.plugins.engines.run import Outcome
from fedml_noniid.plugins.engines.simulation import resolve_device
from fedml_noniid.plugins.models import build
from fedml_noniid.plugins.simulate import simulate
from tests.recipe_table import ALONE

CLIENTS = [np.arange(0, 5), np.arange(5, 12), np.arange(12, 30), np.arange(30, 41)]


def run(recipe: str, settings: dict[str, dict[str, object]], engine: str, device: str) -> Outcome:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 1, 2, 4, generator=generator, dtype=torch.float64).to(device)
    y = torch.randint(0, 3, (60,), generator=generator).to(device)
    network = build("mlp", (1, 2, 4), 3, {"hidden": 4, "batch_norm": True})
    local = LocalTraining(lr=0.1, epochs=1, batch_size=4)
    test, public = Samples(x[41:50], y[41:50]), Samples(x[50:], y[50:])
    simulation = simulate(
        recipe,
        settings,
        Federation.of(Samples(x, y), CLIENTS, test, public=public),
        Plan(network, local, 2, 3, 0, engine=engine),
    )
    return simulation.run()


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; this machine has none"
)
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(("recipe", "settings"), ALONE.values(), ids=ALONE)
def test_a_gpu_gives_the_cpus_results(
    recipe: str, settings: dict[str, dict[str, object]], engine: str
) -> None:
    cpu, gpu = run(recipe, settings, "sequential", "cpu"), run(recipe, settings, engine, "cuda")
    for key, leaf in cpu.params.items():
        torch.testing.assert_close(gpu.params[key].cpu(), leaf, rtol=1e-6, atol=1e-9)
    assert [row["bytes_up"] for row in gpu.rows] == [row["bytes_up"] for row in cpu.rows]


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, auto in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert resolve_device("auto").type == auto and resolve_device("cpu").type == "cpu"
    with pytest.raises(UserError, match="'cuda': this machine has no usable CUDA device"):
        resolve_device("cuda")
