"""Measures Flower (flwr[simulation] 1.21.0): its simulation engine with Ray actors of one core each.

Flower draws the cohorts itself. Its clients shuffle and cut ready tensors into batches.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from flwr.client import ClientApp, NumPyClient
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor

from benchmarks.peers.harness import Job, Meter, main, read_job

read = cache(read_job)  # once per actor


class Client(NumPyClient):  # type: ignore[misc]  # flwr is not there when types are checked
    """One client. It trains like Flower's PyTorch examples."""

    def __init__(self, path: Path, client: int) -> None:
        self.job, self.client = read(path), client

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        torch.set_num_threads(1)
        job, module = self.job, self.job.module()
        with torch.no_grad():
            for parameter, value in zip(module.parameters(), parameters, strict=True):
                parameter.copy_(torch.from_numpy(value))
        optimizer = torch.optim.SGD(module.parameters(), job.lr)
        x, y = job.x[job.own(self.client)], job.y[job.own(self.client)]
        for _ in range(job.epochs):
            for rows in torch.split(torch.randperm(len(y)), job.batch):
                optimizer.zero_grad()
                torch.autograd.backward(F.cross_entropy(module(x[rows]), y[rows]))
                optimizer.step()
        return [p.detach().numpy() for p in module.parameters()], len(y), {}


class Strategy(FedAvg):  # type: ignore[misc]  # flwr is not there when types are checked
    """FedAvg with a clock."""

    def watch(self, meter: Meter) -> None:
        self.meter, self.latest = meter, self.initial_parameters

    def configure_fit(self, *given: Any, **named: Any) -> Any:
        self.meter.begin()
        return super().configure_fit(*given, **named)

    def aggregate_fit(self, *given: Any, **named: Any) -> Any:
        self.latest, metrics = super().aggregate_fit(*given, **named)
        self.meter.end()
        return self.latest, metrics


def measure(job: Job, _: str) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Measures all rounds."""
    path, meter = Path(sys.argv[-1]).resolve(), Meter()
    named = dict(job.module().named_parameters())
    share, initial = job.cohort / job.clients, [p.detach().numpy() for p in named.values()]
    strategy = Strategy(
        fraction_fit=share, fraction_evaluate=0.0, min_fit_clients=job.cohort, min_available_clients=job.clients,
        initial_parameters=ndarrays_to_parameters(initial), accept_failures=False,
    )  # fmt: skip
    strategy.watch(meter)
    components = ServerAppComponents(config=ServerConfig(num_rounds=len(job.cohorts)), strategy=strategy)
    run_simulation(
        ServerApp(server_fn=lambda context: components),
        ClientApp(client_fn=lambda context: Client(path, int(context.node_config["partition-id"])).to_client()),
        num_supernodes=job.clients,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    values = parameters_to_ndarrays(strategy.latest)
    weights = {key: torch.from_numpy(value) for key, value in zip(named, values, strict=True)}
    return meter.found(job.warm), weights


if __name__ == "__main__":
    # Imported by name, so Ray's actors import it too. Ray would send code of __main__ with every message.
    from benchmarks.peers import with_flower

    main(with_flower.measure)
