"""rFedAvg and rFedAvg+ as their authors' code has them, and other readings of the paper.
The paper's methods are in `algorithm.py`: Wang et al., Distribution-Regularized Federated Learning
on Non-IID Data, ICDE 2022. The authors' code, "the repo" below: https://github.com/BUAA-BDA/rfedavg

The defaults are the repo's readings. Options:
- `delta="batch"`: delta is the mean over L of the client's samples, drawn anew for each map (the
  repo: one random training batch). "full": over the full local set.
- `delta_scope="sampled"`: only the delta of this round's cohort counts (the repo). In rFedAvg each
  client's delta is from its last participation. rFedAvg+ needs maps by the model of the round, but
  the next cohort is not yet known then. So all clients map, and only the cohort counts. "known":
  the last known delta of every client.
- `warmup="delta0"`: every client maps its data with w_0 before round 1. The repo has no such
  exchange: at first its rFedAvg clients map with weights of their own, its rFedAvg+ clients with
  w_0. "none": no exchange; unknown clients are left out, and lambda is 0 for a client that knows no
  other.
- `weights="uniform"`: every client weighs the same (the repo). "size": n_k / n.
- `opt_state="persist"`: the optimiser keeps its state from the client's last round (the repo).
  "reset": it starts afresh.
- `mmd` (rFedAvg): "mean" is eq. 5 and the repo. "sum" has no 1/(N-1), as sections IV-B and V print
  it.
- `delta_time` (rFedAvg): "end" maps with the local model after training. "start" maps with the
  received model, as line 10 prints. The repo maps with the model that the client kept from its last
  round.
- `plus="incl_self"` (rFedAvg+): the mean includes the client itself (the repo). "exclude": it does
  not.
- `dp="repo"`: no clipping; noise of std sigma on every feature of a batch, which is sigma / sqrt(L)
  on its mean. In rFedAvg the noise is on the client's mean. In rFedAvg+ it is on the average that
  the server sends, with one draw per round for all clients. That hides nothing from the server.
  "paper": as in `algorithm.py`.

FedML pairs: `make_pair("rfedavg_authors")`, `make_pair("rfedavg_plus_authors")`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedml_noniid.core.component import (
    Answer,
    Asks,
    Client,
    Exchanges,
    Exclusive,
    Reply,
    Server,
    Setting,
    Trace,
    Weights,
)
from fedml_noniid.core.data import Pass, masked_mean
from fedml_noniid.core.randomness import fold, noisy, uniform
from fedml_noniid.core.sums import added
from fedml_noniid.core.trees import Tree
from fedml_noniid.plugins.rfedavg.algorithm import MeanFeatures, RFedAvg, RFedAvgPlus


@dataclass(frozen=True)
class Readings(MeanFeatures):
    """The options that both algorithms share.

    The server's table has zeros where a delta is not known.
    """

    delta: Literal["batch", "full"] = "batch"
    delta_scope: Literal["sampled", "known"] = "sampled"
    warmup: Literal["delta0", "none"] = "delta0"
    dp: Literal["none", "paper", "repo"] = "none"  # type: ignore[assignment]  # a word more
    weights: Weights = "uniform"
    opt_state: Literal["persist", "reset"] = "persist"

    @property
    def exclusive(self) -> frozenset[Exclusive]:
        return super().exclusive | (
            {Exclusive.OPTIMIZER_MEMORY} if self.opt_state == "persist" else set()
        )

    def fewest(self, setting: Setting) -> int:
        return setting.cohort if self.delta_scope == "sampled" else setting.n_clients

    def exchanges(self, setting: Setting) -> Exchanges:
        return super().exchanges(setting)._replace(begin=int(self.warmup == "delta0"))

    # client

    def init_client(self, client: Client) -> Tree:
        """The state of the local optimiser, with opt_state = persist."""
        return (
            {"optimizer": client.task.optimizer.init(client.params)}
            if self.opt_state == "persist"
            else {}
        )

    def warm_start(self, client: Client) -> Tree | None:
        return client.memory.get("optimizer")

    def report(self, trace: Trace, client: Client) -> Answer:
        memory = {"optimizer": trace.optimizer} if self.opt_state == "persist" else {}
        return super().report(trace, client)._replace(memory=memory)

    def answer(self, client: Client) -> Answer:
        if self.delta == "batch":
            client = replace(
                client, local_set=drawn(client.local_set, self.L, fold(client.key, "draw"))
            )
        return super().answer(client)

    # server

    def init_server(self, server: Server) -> Tree:
        table = super().init_server(server)
        return (
            table
            if self.warmup == "delta0"
            else table | {"known": torch.zeros_like(table["delta"][:, 0])}
        )

    def known(self, server: Server) -> Tensor:
        """1 for the clients whose delta is known, [N]."""
        mask: Tensor = server.state.get("known", torch.ones_like(server.state["delta"][:, 0]))
        return mask

    def counted(self, server: Server) -> tuple[int, ...]:
        """The clients whose delta a client of the cohort may be compared with."""
        return server.cohort if self.delta_scope == "sampled" else tuple(range(server.n_clients))

    def survey(self, server: Server) -> Asks | None:
        # This mixin's `super()` is an rFedAvg, and its `survey` asks; mypy sees `Component`'s.
        return None if server.round == 0 and self.warmup == "none" else super().survey(server)  # type: ignore[return-value]

    def map(self, server: Server, to: tuple[int, ...]) -> Asks:
        return super().map(
            server, tuple(range(server.n_clients)) if self.delta_scope == "sampled" else to
        )

    def renewed(self, state: Tree, replies: Reply) -> Tree:
        renewed_state = super().renewed(state, replies)
        rows = torch.tensor(replies.clients, device=renewed_state["delta"].device)
        return (
            renewed_state | {"known": renewed_state["known"].index_fill(0, rows, 1)}
            if "known" in renewed_state
            else renewed_state
        )

    def recorded(self, server: Server, state: Tree) -> Tree:
        unknown = self.known(replace(server, state=state)).unsqueeze(1) == 0
        return super().recorded(
            server, state | {"delta": state["delta"].masked_fill(unknown, torch.nan)}
        )


@dataclass(frozen=True)
class RFedAvgAuthors(Readings, RFedAvg):
    """rFedAvg with the options of its authors' code."""

    name: ClassVar[str] = "rfedavg_authors"

    mmd: Literal["mean", "sum"] = "mean"
    delta_time: Literal["end", "start"] = "end"

    def message(self, server: Server) -> Tree:
        """Line 3 for the clients that count, [M, N-1, d], and which of them are known, [M, N-1]."""
        others = [[j for j in self.counted(server) if j != k] for k in server.cohort]
        index = torch.tensor(others, dtype=torch.int64, device=server.state["delta"].device)
        sent = {"others": server.state["delta"].nan_to_num()[index]}
        return sent | ({"known": server.state["known"][index]} if "known" in server.state else {})

    def r(self, phi: Tensor, others: Tree) -> Tensor:
        """1/(N-1) sum over j != k of ||phi - delta^j||^2 (eq. 5), or without the factor; N - 1
        counts the known."""
        distances, known = (phi - others["others"]).square().sum(1), others.get("known")  # [N-1]
        mean = masked_mean(distances, known)
        return (
            mean
            if self.mmd == "mean"
            else mean * (len(distances) if known is None else known.sum())
        )

    def protected(self, delta: Tensor, local_set: Pass, key: Tensor) -> Tensor:
        if self.dp != "repo":
            return super().protected(delta, local_set, key)
        return noisy(delta, self.sigma / self.batch(local_set, delta).sqrt(), key)

    def report(self, trace: Trace, client: Client) -> Answer:
        if self.delta_time == "start":
            trace = trace._replace(params=client.params, buffers=client.buffers)
        return super().report(trace, client)


@dataclass(frozen=True)
class RFedAvgPlusAuthors(Readings, RFedAvgPlus):
    """rFedAvg+ with the options of its authors' code."""

    name: ClassVar[str] = "rfedavg_plus_authors"

    plus: Literal["incl_self", "exclude"] = "incl_self"

    def message(self, server: Server) -> Tree:
        """Line 18 over the clients that count and are known, [M, d]; whether another such client
        exists, [M]."""
        delta, known = server.state["delta"].nan_to_num(), self.known(server)
        counted, rows = list(self.counted(server)), list(server.cohort)
        total, count = self.total(server), known[counted].sum()
        others = count - known[rows]  # [M]
        if self.plus == "exclude":
            mean = (total - delta[rows]) / others.clamp(min=1).unsqueeze(1)
        else:
            mean = (total / count.clamp(min=1)).expand(len(rows), -1)
        if self.dp == "repo":
            mean = mean + noisy(
                torch.zeros_like(total), self.sigma / math.sqrt(self.L), fold(server.key, "noise")
            )
        return {"mean": mean} | (
            {"known": (others > 0).to(mean.dtype)} if "known" in server.state else {}
        )

    def filled(self, delta: Tensor, n: int) -> Tree:
        state = super().filled(delta, n)
        return state if self.delta_scope == "known" else {"delta": state["delta"]}

    def total(self, server: Server) -> Tensor:
        if self.delta_scope == "known":
            return super().total(server)
        return added(server.state["delta"][list(server.cohort)])

    def r(self, phi: Tensor, others: Tree) -> Tensor:
        distance: Tensor = super().r(phi, others) * others.get("known", 1)
        return distance


def drawn(local_set: Pass, size: int, key: Tensor) -> Pass:
    """One batch of `size` samples of a pass, uniformly without replacement; all if there are
    fewer."""
    index = local_set.index.flatten()
    order = uniform(key, len(index))
    if local_set.mask is None:
        index = index[order.argsort(stable=True)[:size]]
        return Pass(local_set.samples, index, sizes=(len(index),), read=local_set.read)
    # Padding comes last, so that a client draws the same samples with it and without.
    mask = local_set.mask.flatten()
    chosen = torch.where(mask, order, torch.ones_like(order)).argsort(stable=True)[:size]
    return Pass(
        local_set.samples,
        index[chosen].unsqueeze(0),
        mask=mask[chosen].unsqueeze(0),
        read=local_set.read,
    )
