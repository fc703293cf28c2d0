"""Measures Flower (flwr[simulation] 1.42.0): its simulation with Ray actors of one core each, and
its message API.

The argument is the number of actors. Flower draws the cohorts itself. Its clients shuffle and cut
ready tensors into batches. All draws are seeded: a client's shuffle depends only on the round and
the client. Flower's FedAvg sums the replies in the order in which they arrive, so the last bits may
differ from run to run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor

from benchmarks.peers.harness import Job, Meter, main, read_job, version

SEED = 0
read = cache(read_job)  # once per actor
client_app = ClientApp()


@client_app.train()  # type: ignore[untyped-decorator]  # flwr is not there when types are checked
def train(message: Message, context: Context) -> Message:
    """Trains one client like Flower's PyTorch examples."""
    torch.set_num_threads(1)
    config, client = message.content["config"], int(context.node_config["partition-id"])
    job = read(Path(config["job"]))
    module = job.module()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(module.parameters(), job.lr)
    x, y = job.x[job.samples_of(client)], job.y[job.samples_of(client)]
    order = torch.Generator().manual_seed(config["server-round"] * job.clients + client)
    for _ in range(job.epochs):
        for rows in torch.split(torch.randperm(len(y), generator=order), job.batch):
            optimizer.zero_grad()
            torch.autograd.backward(F.cross_entropy(module(x[rows]), y[rows]))
            optimizer.step()
    reply = {
        "arrays": ArrayRecord(module.state_dict()),
        "metrics": MetricRecord({"num-examples": len(y)}),
    }
    return Message(content=RecordDict(reply), reply_to=message)


class Strategy(FedAvg):  # type: ignore[misc]  # flwr is not there when types are checked
    """FedAvg with a clock."""

    def watch(self, meter: Meter) -> None:
        self.meter = meter

    def configure_train(self, *args: Any, **named: Any) -> Any:
        self.meter.begin()
        return super().configure_train(*args, **named)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        arrived = list(replies)
        if failed := [reply.error.reason for reply in arrived if reply.has_error()]:
            raise RuntimeError(f"{len(failed)} clients failed: {failed[0]}")
        aggregated = super().aggregate_train(server_round, arrived)
        self.meter.end()
        return aggregated


def measure(job: Job, actors: str) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Measures all rounds."""
    path, meter, ended = Path(sys.argv[-1]).resolve(), Meter(), {}
    strategy = Strategy(
        fraction_train=job.cohort / job.clients,
        fraction_evaluate=0.0,
        min_train_nodes=job.cohort,
        min_available_nodes=job.clients,
    )
    strategy.watch(meter)
    server_app = ServerApp()

    @server_app.main()  # type: ignore[untyped-decorator]  # flwr is not there when types are checked
    def serve(grid: Grid, context: Context) -> None:
        random.seed(SEED)  # Flower draws the cohorts from Python's generator
        initial, config = ArrayRecord(job.module().state_dict()), ConfigRecord({"job": str(path)})
        ended["result"] = strategy.start(
            grid, initial, num_rounds=len(job.cohorts), train_config=config
        )

    run_simulation(
        server_app,
        client_app,
        num_supernodes=job.clients,
        backend_config={
            "init_args": {"num_cpus": int(actors)},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )
    final = ended["result"].arrays.to_torch_state_dict()
    return meter.measured(job.warm, version("flwr")), {
        name: final[name] for name, _ in job.module().named_parameters()
    }


if __name__ == "__main__":
    # Imported by name, so Ray's actors import it too. Ray would send code of __main__ with every
    # message.
    from benchmarks.peers import with_flower

    main(with_flower.measure)
