"""rFedAvg and rFedAvg+ as their authors' code has them.
The paper's methods are in `fedml_noniid.plugins.rfedavg`: Wang et al., Distribution-Regularized
Federated Learning on Non-IID Data, ICDE 2022. The authors' code:
https://github.com/BUAA-BDA/rfedavg

What differs from the paper:
- delta is the mean over one random batch of L samples, drawn anew for each map.
- Only the delta of this round's cohort counts. In rFedAvg each client's delta is from its last
  participation. rFedAvg+ needs maps by the model of the round, but the next cohort is not yet known
  then. So all clients map, and only the cohort counts.
- Every client weighs the same.
- The local optimiser keeps its state from the client's last round.
- rFedAvg+'s mean includes the client itself.

What differs from the authors' code: every client maps its data with w_0 before round 1. There, at
first, rFedAvg's clients map with weights of their own; later they map with the model that they kept
from their last round, here with the one that they have just trained. Their noise is left out.
FedML pairs: `make_pair("rfedavg_authors:RFedAvgAuthors")` and so on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedml_noniid.core.component import (
    Answer,
    Asks,
    Client,
    Exclusive,
    Server,
    Setting,
    Trace,
    Weights,
)
from fedml_noniid.core.data import Pass
from fedml_noniid.core.randomness import fold, uniform
from fedml_noniid.core.sums import added
from fedml_noniid.core.trees import Tree
from fedml_noniid.plugins.rfedavg.algorithm import MeanFeatures, RFedAvg, RFedAvgPlus


@dataclass(frozen=True)
class Readings(MeanFeatures):
    """What both algorithms share."""

    weights: ClassVar[Weights] = "uniform"

    @property
    def exclusive(self) -> frozenset[Exclusive]:
        return super().exclusive | {Exclusive.OPTIMIZER_MEMORY}

    def fewest(self, setting: Setting) -> int:
        return setting.cohort

    def init_client(self, client: Client) -> Tree:
        """The state of the local optimiser."""
        return {"optimizer": client.task.optimizer.init(client.params)}

    def warm_start(self, client: Client) -> Tree:
        state: Tree = client.memory["optimizer"]
        return state

    def report(self, trace: Trace, client: Client) -> Answer:
        return super().report(trace, client)._replace(memory={"optimizer": trace.optimizer})

    def answer(self, client: Client) -> Answer:
        """delta^k of a batch."""
        batch = drawn(client, self.L)
        return super().answer(replace(client, local_set=batch))


@dataclass(frozen=True)
class RFedAvgAuthors(Readings, RFedAvg):
    """rFedAvg as in its authors' code."""

    name: ClassVar[str] = "rfedavg_authors"

    def message(self, server: Server) -> Tree:
        """The delta of the cohort's others, [M, M-1, d]."""
        others = [[j for j in server.cohort if j != k] for k in server.cohort]
        table = server.state["delta"]
        return {"others": table[torch.tensor(others, device=table.device)]}


@dataclass(frozen=True)
class RFedAvgPlusAuthors(Readings, RFedAvgPlus):
    """rFedAvg+ as in its authors' code."""

    name: ClassVar[str] = "rfedavg_plus_authors"

    def message(self, server: Server) -> Tree:
        """The mean delta of the cohort, the same for each client, [M, d]."""
        rows = server.state["delta"][list(server.cohort)]
        return {"mean": (added(rows) / len(rows)).expand(len(rows), -1)}

    def map(self, server: Server, to: tuple[int, ...]) -> Asks:
        """Every client maps its data."""
        return super().map(server, tuple(range(server.n_clients)))


def drawn(client: Client, size: int) -> Pass:
    """One batch of `size` of a client's samples, uniformly without replacement; all if there are
    fewer."""
    whole, key = client.local_set, fold(client.key, "draw")
    index = whole.index.flatten()
    order = uniform(key, len(index))
    if whole.mask is None:
        index = index[order.argsort(stable=True)[:size]]
        return Pass(whole.samples, index, sizes=(len(index),), read=whole.read)
    # Padding comes last, so that a client draws the same samples with it and without.
    mask = whole.mask.flatten()
    chosen = torch.where(mask, order, torch.ones_like(order)).argsort(stable=True)[:size]
    return Pass(
        whole.samples,
        index[chosen].unsqueeze(0),
        mask=mask[chosen].unsqueeze(0),
        read=whole.read,
    )
