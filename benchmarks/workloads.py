"""The workloads and their job files.

A job file has the data, weights, cohorts and batches for all engines.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch

from benchmarks.peers.harness import WEIGHTS
from fedml_noniid.data.batches import epochs
from fedml_noniid.data.streams import Streams
from fedml_noniid.engines.cohort import draw_cohort
from fedml_noniid.engines.plan import initial_model
from fedml_noniid.models import build
from fedml_noniid.models.model import Model

SEED, CLASSES = 0, 10


@dataclass(frozen=True)
class Workload:
    """FedAvg with SGD on one model, with clients of equal size."""

    name: str
    what: str  # in words
    model: str
    shape: tuple[int, int, int]
    clients: int
    cohort: int
    per_client: int  # samples
    batch: int  # samples
    lr: float
    warm: int  # rounds of warm-up, not measured
    rounds: int  # measured rounds
    epochs: int = 1
    hidden: int = 32  # width of `mlp`
    at_once: int = 1  # rounds per turn of an engine
    trial_s: float = 1.0  # for each way to write the bare loop; at least two attempts

    @property
    def steps(self) -> int:
        """Steps of all clients in one round."""
        return self.cohort * self.epochs * self.per_client // self.batch

    def quick(self) -> Workload:
        """The same workload with only enough rounds to test that it runs."""
        return dataclasses.replace(self, warm=1, rounds=min(self.rounds, 2), trial_s=0.0)


WORKLOADS = {
    w.name: w
    for w in (
        # Several rounds per turn: in one short round other engines' data would be in the caches.
        Workload("mlp", "MLP 64-32-10, 100 clients x 100, batch 10",
                 "mlp", (1, 8, 8), 100, 100, 100, 10, 0.1, 2, 28, at_once=10),
        Workload("cifar_cnn", "pfl's CIFAR-10 CNN, 20 clients x 50, batch 10",
                 "pfl_cnn", (3, 32, 32), 20, 20, 50, 10, 0.02, 1, 10),
        # The paper's number of silos.
        Workload("mnist_cnn", "rFedAvg's CNN, 28 x 28, 20 clients x 500, batch 100",
                 "cnn", (1, 28, 28), 20, 20, 500, 100, 0.05, 1, 3),
        Workload("resnet18", "ResNet-18, 32 x 32, 10 clients x 32, batch 32",
                 "resnet18", (3, 32, 32), 10, 10, 32, 32, 0.01, 1, 1),
        Workload("partial", "MLP, 100 of 1,000 clients a round",
                 "mlp", (1, 8, 8), 1000, 100, 100, 10, 0.1, 2, 28, at_once=10),
    )
}  # fmt: skip


def network(settings: Workload) -> Model:
    """Our network for a workload."""
    options: dict[str, dict[str, int | bool]] = {
        "mlp": {"hidden": settings.hidden},
        "pfl_cnn": {"dropout": False},
    }
    return build(settings.model, settings.shape, CLASSES, options.get(settings.model))


def write_job(workload: Workload, path: Path) -> None:
    """Draws everything from the seed.

    The samples of a class are noisy copies of one picture, so learning is possible.

    Cohorts, batches and initial weights equal those of our simulation with the same seed.
    """
    generator = torch.Generator().manual_seed(SEED)
    n = workload.clients * workload.per_client
    pictures = torch.randn(CLASSES, prod(workload.shape), generator=generator)
    y = torch.randint(0, CLASSES, (n,), generator=generator)
    x = torch.randn(n, prod(workload.shape), generator=generator).add_(pictures[y], alpha=1.0)
    params, _ = initial_model(network(workload), SEED, x)
    total = workload.warm + workload.rounds
    cohorts = [draw_cohort(SEED, t, workload.clients, workload.cohort) for t in range(1, total + 1)]
    batches = np.stack([_batches(workload, t, cohort) for t, cohort in enumerate(cohorts, start=1)])
    settings = json.dumps(dataclasses.asdict(workload))
    arrays = {WEIGHTS + key: leaf.numpy() for key, leaf in params.items()}
    with path.open("wb") as file:
        np.savez(
            file,
            settings=np.array(settings),
            x=x.reshape(n, *workload.shape).numpy(),
            y=y.numpy(),
            cohorts=np.array(cohorts),
            batches=batches,
            **arrays,
        )


def _batches(
    workload: Workload, t: int, cohort: tuple[int, ...]
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """[M, S, B]."""
    streams, size = Streams(SEED, "batches", t), workload.per_client
    orders = [
        epochs(
            np.arange(k * size, (k + 1) * size), workload.epochs, workload.batch, streams(k)
        ).index
        for k in cohort
    ]
    return np.stack(orders).reshape(len(cohort), -1, workload.batch)
