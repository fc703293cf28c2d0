"""rFedAvg and rFedAvg+. Wang, Tong, Zhou, Zhang, Pan, Fan, Yang: Distribution-Regularized Federated Learning on Non-IID
Data, ICDE 2022. The authors' code: https://github.com/BUAA-BDA/rfedavg

Algorithms 1 and 2: loss = CE + lambda r_k, where r_k compares the client's mean feature phi with those of the others.
- r is eq. 5 with its factor 1/(N-1); sections IV-B and V print a sum.
- The gradient goes through the mean over the client's own mini-batch; the others' delta are numbers.
- delta is the mean over the full local set (line 10), in eval mode. rFedAvg maps with the local model after training
  (line 10 prints w_cE, the start), rFedAvg+ with the new global model.
- delta_0 is computed with w_0 in an exchange before round 1, d floats per client; the paper does not define it.
- Under partial participation the last known delta of every client counts.

phi is the input of the classifier. Meeting others: rFedAvg+ maps with the model that is sent next, also under FedNNNN.
FedML pairs: `RFedAvgTrainer`, `RFedAvgAggregator`, `RFedAvgPlusTrainer`, `RFedAvgPlusAggregator`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from plugins.core.client import mean_features
from plugins.core.component import (
    Answer,
    Ask,
    Asks,
    Batch,
    Component,
    Data,
    Desk,
    Exchanges,
    RecipeError,
    Reply,
    Server,
    Setting,
    Trace,
    Update,
    View,
    Work,
)
from plugins.core.task import Output, Task, masked_mean
from plugins.core.trees import Params, Tree


@dataclass(frozen=True)
class _DistributionRegularised(Component):
    """What both algorithms share: the table of delta, its first filling, and the map."""

    claims: ClassVar[frozenset[str]] = frozenset({"feature distribution regulariser"})
    passes: ClassVar[frozenset[str]] = frozenset({"own"})

    n_clients: int  # N
    feature_size: int  # d
    lam: float = 1e-4  # lambda, section VI-A, MNIST

    def check(self, setting: Setting) -> None:
        if not (math.isfinite(self.lam) and self.lam >= 0):
            raise RecipeError(f"{self.name}: lam = {self.lam} must be a finite number of at least 0")
        if setting.n_clients < 2:
            raise RecipeError(f"{self.name}: compares clients, so it needs at least 2, got {setting.n_clients}")

    def init_server(self, params: Params, desk: Desk) -> Tree:
        some = next(iter(params.values()))
        return {"delta": some.new_zeros(self.n_clients, self.feature_size)}

    def begin(self, server: Server, clients: tuple[int, ...]) -> Asks:
        """delta_0: every client maps its data with w_0."""
        return (yield from self.map(server, clients))

    def map(self, server: Server, clients: tuple[int, ...]) -> Asks:
        """`clients` map their data with the server's model; returns the server with their rows of delta renewed."""
        replies: Reply = yield Ask(f"{self.name}.map", clients, server.params, server.buffers, {}, {})
        state = self.renewed(server.state[self.name], replies)
        return server._replace(state=server.state | {self.name: state})

    def renewed(self, state: Tree, replies: Reply) -> Tree:
        """The table with the rows of those who replied."""
        rows = torch.tensor(replies.clients, device=state["delta"].device)
        return {"delta": state["delta"].index_copy(0, rows, replies.upload[self.name]["delta"])}

    def answer(self, job: str, work: Work) -> Answer:
        """delta^k = mean_j phi(x_kj) under the model that was sent (algorithm 2, line 15)."""
        delta = mean_features(work.task, work.params, work.buffers, work.data.own)
        return Answer({}, {}, {"delta": delta}, work.view.memory, {})


@dataclass(frozen=True)
class RFedAvg(_DistributionRegularised):
    """Pulls the mean feature of each mini-batch towards the delayed mean feature of every other client."""

    name: ClassVar[str] = "rfedavg"

    def exchanges(self, cohort: int) -> Exchanges:
        return Exchanges(begin=1)

    def address(self, state: Tree, cohort: tuple[int, ...]) -> Tree:
        """Line 3: every other client's delta, [M, N-1, d]."""
        table = state["delta"]
        return {"others": torch.stack([torch.cat([table[:k], table[k + 1 :]]) for k in cohort])}

    def penalty(self, task: Task, params: Params, out: Output, batch: Batch, view: View) -> Tensor:
        """lambda r_k, r_k = 1/(N-1) sum over j != k of ||mean_B phi - delta^j||^2 (eq. 5)."""
        phi = masked_mean(out.features, batch.mask)  # [d]
        r: Tensor = (phi - view.each["others"]).square().sum(1).mean()
        return self.lam * r

    def report(self, task: Task, trace: Trace, view: View, data: Data) -> tuple[Tree, Tree]:
        """Line 10, with the local model after training."""
        return {"delta": mean_features(task, trace.end, trace.buffers, data.own)}, view.memory

    def step(self, direction: Params, state: Tree, update: Update) -> tuple[Params, Tree]:
        """Line 13: the server keeps the new delta."""
        return direction, self.renewed(state, update.replies)


@dataclass(frozen=True)
class RFedAvgPlus(_DistributionRegularised):
    """Pulls it towards the mean of the others' features, all mapped with the same global model."""

    name: ClassVar[str] = "rfedavg_plus"

    def exchanges(self, cohort: int) -> Exchanges:
        return Exchanges(begin=1, round=1)

    def address(self, state: Tree, cohort: tuple[int, ...]) -> Tree:
        """Lines 4 and 18: delta^{-k}, the mean over the other clients, [M, d]."""
        table = state["delta"]
        own = table[torch.tensor(cohort, device=table.device)]
        return {"mean": (table.sum(0) - own) / (self.n_clients - 1)}

    def penalty(self, task: Task, params: Params, out: Output, batch: Batch, view: View) -> Tensor:
        """lambda ||mean_B phi - delta^{-k}||^2 (section IV-C)."""
        phi = masked_mean(out.features, batch.mask)  # [d]
        r: Tensor = (phi - view.each["mean"]).square().sum()
        return self.lam * r

    def after_step(self, server: Server, update: Update, desk: Desk) -> Asks:
        """Lines 13-18: the cohort maps its data with the new model."""
        return (yield from self.map(server, update.replies.clients))
