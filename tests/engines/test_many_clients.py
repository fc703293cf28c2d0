"""A simulation with very many clients: what it does before and in a round is in array code."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedml_noniid.core.data import Samples
from fedml_noniid.data.ragged import Ragged
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.local_training import LocalTraining
from fedml_noniid.engines.plan import Plan
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.models import build
from fedml_noniid.simulate import simulate
from tests.work import calls, peak_bytes

FEW, MANY = 1_000, 50_000
COHORT = 10


def simulation(n_clients: int, recipe: str, engine: str) -> Simulation:
    """Clients with two samples of two features each."""
    draw = torch.Generator().manual_seed(0)
    train = Samples(torch.randn(2 * n_clients, 2, generator=draw), torch.arange(2 * n_clients) % 2)
    clients = Ragged(np.arange(2 * n_clients), np.arange(0, 2 * n_clients + 1, 2))
    of = Federation.from_indices(train, clients, Samples(train.x[:50], train.y[:50]))
    local = LocalTraining(epochs=1, batch_size=2, lr=0.1)
    plan = Plan(build("logistic_regression", (2,), 2), local, 4, COHORT, 0, engine=engine)
    return simulate(recipe, {}, of, plan)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_neither_start_nor_rounds_have_work_for_each_client(engine: str) -> None:
    """Fifty times the clients: as many calls, and memory for the numbers of a client only."""

    def ran(n_clients: int) -> None:
        simulation(n_clients, "fedprox", engine).run()

    ran(FEW)  # what is imported and cached on the first use
    before = calls(lambda: ran(FEW))
    assert calls(lambda: ran(MANY)) < before + (MANY - FEW) / 100
    grown = peak_bytes(lambda: ran(MANY)) - peak_bytes(lambda: ran(FEW))
    assert grown < 150 * (MANY - FEW)
