"""rFedAvg and rFedAvg+. Wang, Tong, Zhou, Zhang, Pan, Fan, Yang: Distribution-Regularized Federated Learning on Non-IID
Data, ICDE 2022. The authors' code, "the repo" below: https://github.com/BUAA-BDA/rfedavg

Algorithms 1 and 2: loss = CE + lambda r_k, where r_k compares the client's mean feature phi with those of the others.
phi is the input of the classifier. The gradient goes through the mean over the client's own mini-batch; the others'
delta are numbers. Choices, and the options beside them:
- rFedAvg's r is eq. 5 with its factor 1/(N-1); `mmd="sum"` is what sections IV-B and V print. rFedAvg+ has no such sum,
  and its gradient is that of "mean" only.
- delta is the mean over the full local set (line 10), in eval mode. `delta="batch"`: over L of its samples, drawn anew
  for each map (the repo: one random training batch).
- rFedAvg maps with the local model after training; `delta_time="start"`: with the received w_cE, as line 10 prints.
- rFedAvg+ maps with the new global model. Its mean leaves the client itself out; `plus="incl_self"`: not (the repo).
- Under partial participation the last known delta of every client counts. `delta_scope="sampled"`: this round's cohort
  only (the repo). In rFedAvg, with what each of them mapped when it last took part. rFedAvg+ needs maps by the model of
  the round, and the next cohort is not known when that model is: so all clients map, and only the cohort counts.
- delta_0 is computed with w_0 in an exchange before round 1, d floats per client; the paper does not define it.
  `warmup="none"`: no such exchange; unknown clients are left out, and lambda is 0 for whom nobody else is known.
- `dp="paper"` (section VI-B.8): the client clips delta to C_0 = `clip` ("C_2" there is read as C_0) and adds
  N(0, (sigma C_0 / L)^2), with n_k for L if that is less. `dp="repo"`: no clipping; noise of std sigma on every feature
  of a batch, which is sigma / sqrt(L) on its mean. In rFedAvg on the client's mean; in rFedAvg+ on the average that the
  server sends, one draw a round for all, which hides nothing from the server. Both measure what noise does to accuracy:
  it repeats with the run's seed, so a deployment, where somebody could draw it again, is refused.
- Clients weigh n_k / n; `weights="uniform"` (the repo). The optimiser starts each round afresh; `opt_state="persist"`:
  where the client's last round left it (the repo).

`L` is not read from the local training: set it to its batch size.
Meeting others: rFedAvg maps before FNR-FL refines. rFedAvg+ maps with the model that is sent next, also under FedNNNN,
and after a distillation on the server (FedDF, FedFTG), whose `after_step` comes before by the order of names.
FedML pairs: `RFedAvgTrainer`, `RFedAvgAggregator`, `RFedAvgPlusTrainer`, `RFedAvgPlusAggregator`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from plugins.core.component import Asks, Data, Desk, Exchanges, Options, Plan, Server, Trace, Update, View
from plugins.core.noise import fold
from plugins.core.task import Task, masked_mean
from plugins.core.trees import Params, Tree
from plugins.rfedavg.delta import NOISE, DistributionRegularised, known
from plugins.rfedavg.privacy import noisy


@dataclass(frozen=True)
class RFedAvg(DistributionRegularised):
    """Pulls the mean feature of each mini-batch towards the delayed mean feature of every other client."""

    name: ClassVar[str] = "rfedavg"
    options: ClassVar[Options] = {
        **DistributionRegularised.options,
        "mmd": ("mean", "sum"),
        "delta_time": ("end", "start"),
    }

    mmd: str = "mean"
    delta_time: str = "end"

    def exchanges(self, cohort: int) -> Exchanges:
        return Exchanges(begin=int(self.warmup == "delta0"))

    def address(self, state: Tree, cohort: tuple[int, ...]) -> Tree:
        """Line 3: every other client's delta, [M, N-1, d], and which of them are known, [M, N-1]."""
        others = [[j for j in self.counted(cohort) if j != k] for k in cohort]
        index = torch.tensor(others, dtype=torch.int64, device=state["delta"].device)  # [M, N-1]
        return {"others" if key == "delta" else key: table[index] for key, table in state.items()}

    def regulariser(self, phi: Tensor, others: Tree) -> Tensor:
        """1/(N-1) sum over j != k of ||phi - delta^j||^2 (eq. 5); N - 1 counts the known."""
        distances = (phi - others["others"]).square().sum(1)  # [N-1]
        mask = others.get("known")
        mean = masked_mean(distances, mask)
        return mean if self.mmd == "mean" else mean * (len(distances) if mask is None else mask.sum())

    def protected(self, delta: Tensor, own: Plan, key: Tensor) -> Tensor:
        """As the paper has it, or, with "repo", noise of std sigma on every feature of a batch, seen in its mean."""
        if self.dp != "repo":
            return super().protected(delta, own, key)
        return noisy(delta, self.sigma / self.batch(own, delta).sqrt(), key)

    def report(self, task: Task, trace: Trace, view: View, data: Data) -> tuple[Tree, Tree]:
        """Line 10, with the local model after training, or as printed, before."""
        model = (trace.end, trace.buffers) if self.delta_time == "end" else (view.start, view.buffers)
        return {"delta": self.mapped(task, *model, data)}, self.kept(trace)

    def step(self, direction: Params, state: Tree, update: Update) -> tuple[Params, Tree]:
        """Line 13: the server keeps the new delta."""
        return direction, self.renewed(state, update.replies)


@dataclass(frozen=True)
class RFedAvgPlus(DistributionRegularised):
    """Pulls it towards the mean of the others' features, all mapped with the same global model."""

    name: ClassVar[str] = "rfedavg_plus"
    options: ClassVar[Options] = {**DistributionRegularised.options, "plus": ("exclude", "incl_self")}

    plus: str = "exclude"

    def exchanges(self, cohort: int) -> Exchanges:
        return Exchanges(begin=int(self.warmup == "delta0"), round=1)

    def init_server(self, params: Params, desk: Desk) -> Tree:
        state = super().init_server(params, desk)
        return state | {"noise": self.noise(state, desk)} if self.dp == "repo" else state

    def noise(self, state: Tree, desk: Desk) -> Tensor:
        """The repo's, on the average that is sent in the next round, [d]."""
        return noisy(torch.zeros_like(state["delta"][0]), self.sigma / math.sqrt(self.L), fold(desk.key, NOISE))

    def address(self, state: Tree, cohort: tuple[int, ...]) -> Tree:
        """Lines 4 and 18: delta^{-k}, the mean over the other clients, [M, d], and whether any is known, [M]."""
        table, is_known = state["delta"], known(state)
        counted, rows = list(self.counted(cohort)), list(cohort)
        total, count = table[counted].sum(0), is_known[counted].sum()
        n_others = count - is_known[rows]  # [M]
        if self.plus == "exclude":
            mean = (total - table[rows]) / n_others.clamp(min=1).unsqueeze(1)
        else:
            mean = (total / count.clamp(min=1)).expand(len(rows), -1)
        mean = mean + state["noise"] if self.dp == "repo" else mean
        return {"mean": mean} | ({"known": (n_others > 0).to(mean.dtype)} if "known" in state else {})

    def regulariser(self, phi: Tensor, others: Tree) -> Tensor:
        """||phi - delta^{-k}||^2 (section IV-C)."""
        r: Tensor = (phi - others["mean"]).square().sum()
        return r * others["known"] if "known" in others else r

    def report(self, task: Task, trace: Trace, view: View, data: Data) -> tuple[Tree, Tree]:
        return {}, self.kept(trace)

    def after_step(self, server: Server, update: Update, desk: Desk) -> Asks:
        """Lines 13-18: the cohort, or all of whom the next is drawn, map their data with the new model."""
        clients = tuple(range(self.n_clients)) if self.delta_scope == "sampled" else update.replies.clients
        server = yield from self.map(server, clients)
        state = server.state[self.name]
        if self.dp == "repo":
            state = state | {"noise": self.noise(state, desk)}
        return server._replace(state=server.state | {self.name: state})
