"""Measures FedML's single-process simulator (fedml 0.8.30, `fedml.simulation.sp.fedavg`), without
`fedml.init`.

`loaders`: torch's loaders, which shuffle by themselves. `batches`: ready lists of tensors in the
job's order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from fedml.core import mlops
from fedml.simulation.sp.fedavg.fedavg_api import FedAvgAPI
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.peers.harness import Job, Meter, main, version


class Timed(FedAvgAPI):  # type: ignore[misc]  # fedml has no types
    """FedML's simulator with our cohorts and batches, without its test of every client, and with a
    clock."""

    def watch(self, job: Job, meter: Meter, ready: bool) -> None:
        self.job, self.meter, self.ready = job, meter, ready
        # On a CPU, FedML's received model in round 1 is the very module that it trains. So each
        # client would start from the model of the previous client. From round 2 on, FedML has a
        # copy. This gives it a copy in round 1 too.
        trainer, live = self.model_trainer, self.model_trainer.get_model_params

        def copied() -> Any:
            trainer.get_model_params = live
            return copy.deepcopy(live())

        trainer.get_model_params = copied

    def _client_sampling(self, round_idx: int, *_: int) -> list[int]:
        """Called when a round begins."""
        if round_idx:
            self.meter.end()
        cohort = self.job.cohorts[round_idx]
        if self.ready:
            ordered = zip(cohort, self.job.batches[round_idx], strict=True)
            self.train_data_local_dict = {k: _ready(self.job, rows) for k, rows in ordered}
            self.test_data_local_dict = dict.fromkeys(cohort)
        self.meter.begin()
        return cohort

    def _local_test_on_all_clients(self, round_idx: int) -> None:
        """Called after the first and the last round."""
        if round_idx == len(self.job.cohorts) - 1:
            self.meter.end()


def _ready(job: Job, rows: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(job.x[rows].unbind(), job.y[rows].unbind(), strict=True))


def _loader(job: Job, client: int) -> Iterable[Any]:
    samples = TensorDataset(job.x[job.samples_of(client)], job.y[job.samples_of(client)])
    return DataLoader(samples, batch_size=job.batch, shuffle=True)


def measure(job: Job, mode: str) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Measures all rounds."""
    ready = mode == "batches"
    settings = SimpleNamespace(
        dataset="benchmark",
        client_num_in_total=job.clients,
        client_num_per_round=job.cohort,
        comm_round=len(job.cohorts),
        epochs=1 if ready else job.epochs,
        batch_size=job.batch,
        learning_rate=job.lr,
        client_optimizer="sgd",
        frequency_of_the_test=len(job.cohorts),
        enable_wandb=False,
        using_mlops=False,
    )
    mlops.pre_setup(settings)
    torch.manual_seed(0)
    everybody = range(job.clients)
    data: dict[int, Any] = {k: [] if ready else _loader(job, k) for k in everybody}
    sizes = dict.fromkeys(everybody, job.per_client)
    dataset = [len(job.y), 0, None, None, sizes, data, dict.fromkeys(everybody), 10]
    module, meter = job.module(), Meter()
    simulator = Timed(settings, torch.device("cpu"), dataset, module)
    simulator.watch(job, meter, ready)
    simulator.train()
    return meter.measured(job.warm, version("fedml")), dict(module.named_parameters())


if __name__ == "__main__":
    main(measure)
