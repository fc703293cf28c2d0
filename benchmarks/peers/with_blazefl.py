"""Measures BlazeFL (blazefl 3.0.0): its FedAvg in a pool of threads (`threads:N`) or of processes
(`processes:N`).

Batches are ready lists of tensors in the job's order. The loop is that of BlazeFL's
`examples/quickstart-fedavg`.
"""

from __future__ import annotations

import copy
import platform
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from blazefl.contrib import (
    FedAvgBaseServerHandler,
    FedAvgProcessPoolClientTrainer,
    FedAvgThreadPoolClientTrainer,
)
from torch import Tensor, nn

from benchmarks.peers.harness import Job, Meter, main, read_job, version

read = cache(read_job)
SEED = 0  # of BlazeFL's generators; the job's order leaves them nothing to draw


@cache
def network(path: Path) -> nn.Module:
    """The network to copy. A copy is cheaper than a new one."""
    return read(path).module()


class Loader:
    """A client's ready batches, in the form of a data loader."""

    def __init__(self, job: Job, rows: Tensor) -> None:
        """`rows`: [S, B], the samples of each step."""
        self.dataset = range(
            job.per_client
        )  # only its length is read: the client's weight in the mean
        self.job, self.rows = job, rows

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.job.x[self.rows].unbind(), self.job.y[self.rows].unbind(), strict=True)


class Batches:
    """The ready batches, in the form of a BlazeFL data set.

    Processes get the path and not the samples.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.t = path, 0

    def get_dataloader(self, type_: str, cid: int, batch_size: int, generator: object) -> Loader:
        job = read(self.path)
        return Loader(job, job.batches[self.t, job.cohorts[self.t].index(cid)])

    def set_dataset(self, type_: str, cid: int, dataset: object) -> None:
        """Called after a client's training. Nothing changes."""


class Selector:
    """Makes networks for BlazeFL."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def select_model(self, model_name: str) -> nn.Module:
        return copy.deepcopy(network(self.path))


def measure(job: Job, argument: str) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Measures all rounds."""
    path, meter = Path(sys.argv[-1]).resolve(), Meter()
    kind, _, workers = argument.partition(":")
    batches, selector = Batches(path), Selector(path)
    server = FedAvgBaseServerHandler(
        selector,
        job.model,
        batches,
        global_round=len(job.cohorts),
        num_clients=job.clients,
        sample_ratio=job.cohort / job.clients,
        device="cpu",
        batch_size=job.batch,
        seed=SEED,
    )
    settings = {
        "model_selector": selector,
        "model_name": job.model,
        "dataset": batches,
        "device": "cpu",
        "num_clients": job.clients,
        "epochs": 1,  # the job's order already repeats the data for all epochs
        "batch_size": job.batch,
        "lr": job.lr,
        "seed": SEED,
        "num_parallels": int(workers),
    }
    if kind == "threads":
        trainer = FedAvgThreadPoolClientTrainer(**settings)
    else:
        # BlazeFL makes a new pool in every round, fastest by a fork. The first optimizer imports
        # modules for 2 s.
        mp.set_start_method("fork")
        torch.optim.SGD(network(path).parameters(), job.lr)
        trainer = FedAvgProcessPoolClientTrainer(**settings, state_dir=Path("state"))
    for t, cohort in enumerate(job.cohorts):
        batches.t = t
        meter.begin()
        trainer.local_process(server.downlink_package(), cohort)
        for upload in trainer.uplink_package():
            server.load(upload)
        meter.end()
    lock = "without" if not getattr(sys, "_is_gil_enabled", lambda: True)() else "with"
    note = f"{version('blazefl')}, Python {platform.python_version()} {lock} the GIL"
    return meter.measured(job.warm, note), dict(server.model.named_parameters())


if __name__ == "__main__":
    # Imported by name, so that other processes can import its classes.
    from benchmarks.peers import with_blazefl

    main(with_blazefl.measure)
