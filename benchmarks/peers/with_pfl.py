"""Measures pfl-research (pfl 0.6.0, apple/pfl-research): its simulated backend in one process.

Every user's data set has one tensor per field, in the job's order. pfl cuts the tensors into
batches in that order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm import FederatedAveraging, NNAlgorithmParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor

from benchmarks.peers.harness import Job, Meter, main, version


class Clock(TrainingProcessCallback):  # type: ignore[misc]  # pfl is not there when types are checked
    """Times the rounds."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_train_begin(self, *, model: Any) -> Metrics:
        self._begin()
        return Metrics()

    def _begin(self) -> None:
        self.meter.begin()
        if (
            dist.is_initialized()
        ):  # the second process waits for the first, or it would train before its turn
            dist.barrier()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        self.meter.end()
        self._begin()
        return False, Metrics()


def measure(job: Job, _: str) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Measures all rounds."""
    module: Any = job.module()
    module.loss = lambda x, y: F.cross_entropy(module(x), y)
    # Used only in the first round, which is warm-up: pfl always evaluates there.
    module.metrics = lambda x, y: {
        "loss": Weighted(F.cross_entropy(module(x), y, reduction="sum").item(), len(y))
    }
    drawn = iter(
        [(t, position) for t, cohort in enumerate(job.cohorts) for position in range(len(cohort))]
    )

    def dataset(user: tuple[int, int]) -> Dataset:
        rows = job.batches[user].flatten()
        return Dataset((job.x[rows], job.y[rows]), user_id=str(job.cohorts[user[0]][user[1]]))

    users = FederatedDataset(dataset, lambda: next(drawn))
    rounds = len(job.cohorts)
    model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), 1.0))
    meter = Meter()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds,
            train_cohort_size=job.cohort,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=users, val_data=users),
        model,
        # The job's order already repeats the data for all epochs.
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=job.lr, local_batch_size=job.batch
        ),
        callbacks=[Clock(meter)],
        send_metrics_to_platform=False,
    )
    return meter.measured(job.warm, version("pfl")), dict(module.named_parameters())


if __name__ == "__main__":
    main(measure)
