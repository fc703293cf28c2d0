"""Measures FedLab (fedlab 1.3.0): its serial trainer and synchronous server in one process.

Batches are ready lists of tensors in the job's order. The loop is that of FedLab's
`StandalonePipeline`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from torch import Tensor

from benchmarks.peers.harness import Job, Meter, main, version


class Batches:
    """The ready batches, in the form of a FedLab data set."""

    def __init__(self) -> None:
        self.of: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def prepare(self, job: Job, t: int) -> None:
        ordered = zip(job.cohorts[t], job.batches[t], strict=True)
        self.of = {
            k: list(zip(job.x[rows].unbind(), job.y[rows].unbind(), strict=True))
            for k, rows in ordered
        }

    def get_dataloader(self, client: int, batch_size: int) -> list[tuple[Tensor, Tensor]]:
        return self.of[client]


def measure(job: Job, _: str) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Measures all rounds."""
    module, batches, meter = job.module(), Batches(), Meter()
    server = SyncServerHandler(
        module, global_round=len(job.cohorts), sample_ratio=job.cohort / job.clients
    )
    server.num_clients = job.clients
    trainer = SGDSerialClientTrainer(job.module(), num_clients=job.clients)
    trainer.setup_dataset(batches)
    trainer.setup_optim(
        1, job.batch, job.lr
    )  # the job's order already repeats the data for all epochs
    for t, cohort in enumerate(job.cohorts):
        batches.prepare(job, t)
        meter.begin()
        trainer.local_process(server.downlink_package, cohort)
        for upload in trainer.uplink_package:
            server.load(upload)
        meter.end()
    return meter.measured(job.warm, version("fedlab")), dict(server.model.named_parameters())


if __name__ == "__main__":
    main(measure)
