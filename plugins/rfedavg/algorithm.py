"""rFedAvg and rFedAvg+.
Wang, Tong, Zhou, Zhang, Pan, Fan, Yang: Distribution-Regularized Federated Learning on Non-IID
Data, ICDE 2022. The authors' code: https://github.com/BUAA-BDA/rfedavg

Algorithms 1 and 2: loss = CE + lambda r_k, where r_k compares the client's mean feature phi with
those of the others. phi is the input of the classifier. The gradient goes through the mean over the
client's own mini-batch. The others' delta are constants. Choices where the paper is silent or
unclear:
- rFedAvg's r is eq. 5 with its factor 1/(N-1). rFedAvg+ has no such sum; its gradient is that of r
  with this factor.
- delta is the mean over the full local set (line 10), in eval mode.
- rFedAvg maps with the local model after training, as the text says; line 10 prints the received
  one.
- rFedAvg+ maps with the new global model. Its mean leaves the client itself out (line 18).
- Under partial participation the last known delta of every client counts.
- The paper does not define delta_0. Here every client maps its data with w_0 before round 1 and
  sends d floats.
- `dp="paper"` (section VI-B.8): the client clips delta to C_0 = `clip` ("C_2" there is read as C_0)
  and adds N(0, (sigma C_0 / L)^2), with n_k for L if that is less. It measures the effect of noise
  on accuracy. The noise repeats with the run's seed, so anyone with the seed can draw it again: a
  deployment is refused.
- `L` is not read from the local training. Set it to its batch size.

Meeting others: rFedAvg maps before FNR-FL refines. rFedAvg+ maps with the model that is sent next,
also under FedNNNN, and after a distillation on the server (FedDF, FedFTG). FedML pairs:
`RFedAvgTrainer`, `RFedAvgAggregator`, `RFedAvgPlusTrainer`, `RFedAvgPlusAggregator`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedml_noniid.core.component import (
    Answer,
    Ask,
    Asks,
    Change,
    Client,
    Component,
    Exchanges,
    Exclusive,
    Needs,
    Replies,
    Reply,
    Server,
    Setting,
    Trace,
)
from fedml_noniid.core.data import Batch, Pass
from fedml_noniid.core.options import Count, NonNegative, RecipeError
from fedml_noniid.core.randomness import fold, noisy
from fedml_noniid.core.sums import added, from_integers, integers
from fedml_noniid.core.task import Output
from fedml_noniid.core.trees import Params, Tree, n_bytes, row


@dataclass(frozen=True)
class MeanFeatures(Component):
    """What both algorithms share: delta, the clients' mean features, and the server's table of
    them."""

    needs: ClassVar[Needs] = Needs(local_set=True, features=True, replies=Replies.SCALARS)

    lam: NonNegative = 1e-4  # lambda, section VI-A, MNIST
    dp: Literal["none", "paper"] = "none"
    sigma: NonNegative = 0.0  # sigma_2; up to 5 is said to do no harm (section VI-B.8)
    clip: NonNegative = 0.0  # C_0
    L: Count = 100  # batch size, section VI-A, cross-silo

    @property
    def exclusive(self) -> frozenset[Exclusive]:
        return frozenset({Exclusive.FEATURE_MEANS})

    def check(self, setting: Setting) -> None:
        if self.dp == "none" and (self.sigma or self.clip):
            raise RecipeError(f"{self.name}: dp = 'none' does nothing with sigma and clip; set dp")
        if self.dp == "paper" and not self.clip:
            raise RecipeError(
                f"{self.name}: clip = {self.clip} must be above 0 with dp = 'paper'; take the "
                "median norm of delta, "
                f"which a run with dp = 'none' records as {self.name}_delta_norm_median"
            )
        if self.dp != "none" and setting.deployed:
            raise RecipeError(
                f"{self.name}: the noise of dp = {self.dp!r} is drawn from the run's seed, "
                "which the server knows, so "
                "it hides nothing from the server; use FedML's local privacy (dp_args)"
            )
        if (fewest := self.fewest(setting)) < 2:
            raise RecipeError(
                f"{self.name}: compares clients, so it needs at least 2, got {fewest}"
            )

    def fewest(self, setting: Setting) -> int:
        """How many clients are compared."""
        return setting.n_clients

    def exchanges(self, setting: Setting) -> Exchanges:
        return Exchanges(begin=1)

    def init_server(self, server: Server) -> Tree:
        some = next(iter(server.params.values()))
        return self.filled(some.new_zeros(server.task.network.feature_size), server.n_clients)

    def filled(self, delta: Tensor, n: int) -> Tree:
        """The state in which all `n` clients have the same delta [d]."""
        return {"delta": delta.repeat(n, 1)}  # [N, d]

    def r(self, phi: Tensor, others: Tree) -> Tensor:
        """r_k of a mean feature phi [d], 0-d; `others` is what `message` sent."""
        raise NotImplementedError

    def penalty(self, w: Params, out: Output, batch: Batch, client: Client) -> Tensor:
        """lambda r_k, with phi the mean over the mini-batch."""
        return self.lam * self.r(batch.mean(out.features), client.each)

    def answer(self, client: Client) -> Answer:
        """delta^k = 1/n_k sum_j phi(x_kj) under `client.params`, [d]."""

        def phi(batch: Batch) -> Tree:
            return {"delta": client.task.eval(client.params, client.buffers, batch.x).features}

        delta: Tensor = client.local_set.mean(phi)["delta"]
        return Answer({"delta": self.protected(delta, client.local_set, fold(client.key, "noise"))})

    def protected(self, delta: Tensor, local_set: Pass, key: Tensor) -> Tensor:
        """delta / max(1, ||delta|| / C_0) + 1/L N(0, sigma^2 C_0^2 I) (section VI-B.8)."""
        if self.dp != "paper":
            return delta
        within = delta / (torch.linalg.vector_norm(delta) / self.clip).clamp(min=1)
        return noisy(within, self.sigma * self.clip / self.batch(local_set, delta), key)

    def batch(self, local_set: Pass, like: Tensor) -> Tensor:
        """L, or n_k if that is less; 0-d."""
        return (local_set.n * like.new_ones(())).clamp(max=self.L)

    def map(self, server: Server, to: tuple[int, ...]) -> Asks:
        """Clients map their data with the server's model.

        In round 0 the mean answer replaces a dropped one.
        """
        replies = yield Ask("map", to, server.params, server.buffers)
        state, delta = server.state, replies.upload["delta"]
        if server.round == 0:
            state = state | self.filled(added(delta) / len(delta), server.n_clients)
        return Change(self.renewed(state, replies))

    def renewed(self, state: Tree, replies: Reply) -> Tree:
        """The table with the rows of the clients that replied."""
        rows = torch.tensor(replies.clients, device=state["delta"].device)
        return state | {"delta": state["delta"].index_copy(0, rows, replies.upload["delta"])}

    def recorded(self, server: Server, state: Tree) -> Tree:
        """Of the cohort's clients: MMD between them (eq. 2), the mean of their r, the median norm
        of their delta, and the size of the delta that one client is sent (table III, bytes)."""
        cohort = server.replies.clients
        rows = state["delta"][list(cohort)]
        sent = self.message(replace(server, state=state, cohort=cohort))
        r = torch.stack([self.r(phi, row(sent, k)) for k, phi in enumerate(rows)])
        return {
            "mmd": torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist"),  # [M, M]
            "r": r.mean(),
            "delta_norm_median": torch.linalg.vector_norm(rows, dim=1).quantile(0.5),
            "delta_bytes": torch.tensor(n_bytes(sent) // len(cohort)),
        }


@dataclass(frozen=True)
class RFedAvg(MeanFeatures):
    """Algorithm 1: pulls the mean feature of each mini-batch towards the delayed means of the other
    clients."""

    name: ClassVar[str] = "rfedavg"

    def message(self, server: Server) -> Tree:
        """Line 3: every other client's delta, [M, N-1, d]."""
        others = [[j for j in range(server.n_clients) if j != k] for k in server.cohort]
        return {
            "others": server.state["delta"][
                torch.tensor(others, device=server.state["delta"].device)
            ]
        }

    def r(self, phi: Tensor, others: Tree) -> Tensor:
        """1/(N-1) sum over j != k of ||phi - delta^j||^2 (eq. 5)."""
        distance: Tensor = (phi - others["others"]).square().sum(1).mean()
        return distance

    def report(self, trace: Trace, client: Client) -> Answer:
        """Line 10: delta^k with the local model after training."""
        return self.answer(replace(client, params=trace.params, buffers=trace.buffers))

    def step(self, server: Server) -> Change:
        """Line 13: the server keeps the new delta."""
        state = self.renewed(server.state, server.replies)
        return Change(state, metrics=self.recorded(server, state))

    def survey(self, server: Server) -> Asks | None:
        """Line 1: delta_0, with w_0."""
        return self.map(server, server.cohort) if server.round == 0 else None


@dataclass(frozen=True)
class RFedAvgPlus(MeanFeatures):
    """Algorithm 2: pulls the mean feature towards the others' mean, mapped with the same global
    model."""

    name: ClassVar[str] = "rfedavg_plus"

    def exchanges(self, setting: Setting) -> Exchanges:
        return Exchanges(begin=1, round=1)

    def filled(self, delta: Tensor, n: int) -> Tree:
        return super().filled(delta, n) | {"sum": n * integers(delta.unsqueeze(0), n)}

    def renewed(self, state: Tree, replies: Reply) -> Tree:
        """Exchanges the rows in the sum too: it is exact, so it has the bits of a new one."""
        table, come = state["delta"], replies.upload["delta"]
        gone = table[list(replies.clients)]
        total = state["sum"] + integers(come, len(table)) - integers(gone, len(table))
        return super().renewed(state, replies) | {"sum": total}

    def message(self, server: Server) -> Tree:
        """Lines 4 and 18: delta^{-k}, the mean over the other clients, [M, d]."""
        own = server.state["delta"][list(server.cohort)]
        return {"mean": (self.total(server) - own) / (server.n_clients - 1)}

    def total(self, server: Server) -> Tensor:
        """The sum of all delta, [d]."""
        delta = server.state["delta"]
        return from_integers(server.state["sum"], len(delta), delta.dtype)

    def r(self, phi: Tensor, others: Tree) -> Tensor:
        """||phi - delta^{-k}||^2 (section IV-C)."""
        distance: Tensor = (phi - others["mean"]).square().sum()
        return distance

    def step(self, server: Server) -> Change:
        """Only records: the delta that this round used."""
        return Change(metrics=self.recorded(server, server.state))

    def survey(self, server: Server) -> Asks | None:
        """Lines 13-18: the cohort maps its data with the new model; in round 0 every client, with
        w_0."""
        return self.map(server, server.replies.clients if server.round else server.cohort)
