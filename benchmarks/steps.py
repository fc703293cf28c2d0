"""Client steps per CPU second: our engines against a bare PyTorch loop on the same model, data and batches.

`make bench` prints one table; ratios are to the bare loop of the same run, which is the limit for one client at a time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from tabulate import tabulate

from plugins.core.component import Samples
from plugins.engines.clients import LocalTraining
from plugins.engines.simulation import Schedule, Simulation
from plugins.models import build

CLIENTS, PER_CLIENT, BATCH, ROUNDS = 100, 100, 10, 3
STEPS = CLIENTS * PER_CLIENT // BATCH


def bare_loop(x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """One round of FedAvg as a tight loop: one module, one optimiser, ready batches, no framework."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    start = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> None:
        total = [torch.zeros_like(p) for p in start]
        for client in range(CLIENTS):
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), start, strict=True):
                    parameter.copy_(value)
            for first in range(client * PER_CLIENT, (client + 1) * PER_CLIENT, BATCH):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x[first : first + BATCH]), y[first : first + BATCH])
                torch.autograd.backward(loss)
                optimizer.step()
            for mean, parameter in zip(total, model.parameters(), strict=True):
                mean.add_(parameter.detach(), alpha=1 / CLIENTS)
        start[:] = total

    return run


def engine(name: str, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """One round of FedAvg by one of our engines, evaluation on 10 samples included."""
    network = build("mlp", (1, 8, 8), 10, {"hidden": 32})
    clients = [np.arange(k * PER_CLIENT, (k + 1) * PER_CLIENT) for k in range(CLIENTS)]
    samples = Samples(x.reshape(-1, 1, 8, 8), y)
    few = Samples(samples.x[:10], y[:10])
    local = LocalTraining("sgd", lr=0.1, epochs=1, batch_size=BATCH)

    def run() -> None:
        Simulation(
            "fedavg", {}, network, samples, clients, few, None, None, local, Schedule(1, CLIENTS, 0), engine=name
        ).run()

    return run


def steps_per_cpu_second(round_: Callable[[], None]) -> float:
    """The median over rounds, after one round of warm-up."""
    round_()
    rates = []
    for _ in range(ROUNDS):
        began = time.process_time()
        round_()
        rates.append(STEPS / (time.process_time() - began))
    return sorted(rates)[len(rates) // 2]


def main() -> None:
    """Prints the table."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS * PER_CLIENT, 64, generator=generator)
    y = torch.randint(0, 10, (len(x),), generator=generator)
    bare = steps_per_cpu_second(bare_loop(x, y))
    rows = [["bare PyTorch loop", bare, 1.0]]
    for name in ("sequential", "vectorized"):
        rate = steps_per_cpu_second(engine(name, x, y))
        rows.append([f"{name} engine", rate, rate / bare])
    head = ["MLP 64-32-10, 100 clients, batch 10", "steps per CPU second", "ratio to the bare loop"]
    sys.stdout.write(tabulate(rows, head, floatfmt=("", ".0f", ".2f")) + "\n")


if __name__ == "__main__":
    main()
