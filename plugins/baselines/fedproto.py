"""FedProto.
Tan, Long, Liu, Zhou, Lu, Jiang, Zhang: FedProto: Federated Prototype Learning across Heterogeneous
Clients, AAAI 2022. https://arxiv.org/abs/2105.00243. The authors' code:
https://github.com/yuetan031/fedproto

No model travels. Each client trains a whole model of its own and sends the mean feature of each of
its classes, its prototypes. The server averages them class by class and sends them back. The local
loss pulls the features of a class towards the global prototype.
- The average of a class has the weights n_kc / n_c, the clients' samples of it. The paper's formula
  has a factor 1 / |N_c| beside, which would shrink a prototype with the number of its clients: it
  is left out.
- The pull is lambda times the mean square of h - C_y over the d features, as in their code; over
  samples of classes that have no prototype yet it is 0, as in round 1.
- Prototypes are those of the trained model on all local data, in eval mode.
- A class that no client of a round has keeps its prototype. In their code all clients train in
  every round.
Their code differs in three points. A class has the plain mean over the clients that have it
(`weights="uniform"`). A client's prototypes are means over the features of its last epoch's steps,
in training mode, while the model still changes. Each client begins from random weights of its own
(on CIFAR from those of ImageNet), here all begin from w_0.

There is no global model: `params` of a result is w_0, from which all clients begin, and nothing is
averaged. A client is tested with its own model and its classifier; the paper's other way, the
nearest prototype, is left out. A client that never took part is tested with w_0.

Meeting others: they act on a model that is averaged, so all are refused. Its FedML pair is
`make_pair("fedproto")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedml_noniid.core.component import (
    BODY,
    HEAD,
    Answer,
    Change,
    Client,
    Component,
    Needs,
    Replies,
    Server,
    Trace,
    Weights,
)
from fedml_noniid.core.data import Batch, one_hot
from fedml_noniid.core.options import NonNegative, Range
from fedml_noniid.core.sums import added
from fedml_noniid.core.task import Output
from fedml_noniid.core.trees import Params, Tree


@dataclass(frozen=True)
class FedProto(Component):
    """Averages mean features of classes, and no model."""

    name: ClassVar[str] = "fedproto"
    needs: ClassVar[Needs] = Needs(
        personal=frozenset({HEAD, BODY}),
        local_set=True,
        features=True,
        classes=True,
        replies=Replies.SCALARS,
    )
    ranges: ClassVar[Mapping[str, Range]] = {"counts": Range(0, whole=True)}

    lam: NonNegative = 1.0
    weights: Weights = "size"

    def init_server(self, server: Server) -> Tree:
        """C_c [C, d], and which of them there are [C]."""
        network = server.task.network
        some = next(iter(server.task.whole(server.params).values()))
        prototypes = some.new_zeros(network.n_classes, network.feature_size)
        return {"C": prototypes, "known": prototypes.new_zeros(network.n_classes)}

    def broadcast(self, server: Server) -> Tree:
        """The prototypes C_c, [C, d], and which classes have one."""
        return dict(server.state)

    def penalty(self, w: Params, out: Output, batch: Batch, client: Client) -> Tensor | None:
        """lambda mean over the batch of ||h - C_y||^2 / d."""
        if not self.lam:
            return None
        prototypes, known = client.shared["C"][batch.y], client.shared["known"][batch.y]
        return self.lam * batch.mean(known * (out.features - prototypes).square().mean(1))

    def report(self, trace: Trace, client: Client) -> Answer:
        """C_kc = mean of h over the samples of class c, and n_kc."""
        task = client.task

        def sums(batch: Batch) -> Tree:
            h = task.eval(trace.params, trace.buffers, batch.x).features  # [B, d]
            member = one_hot(batch.y, task.network.n_classes, h.dtype)  # [B, C]
            return {
                "h": batch.sum(member.unsqueeze(2) * h.unsqueeze(1)),
                "n": batch.sum(member),
            }

        totals = client.local_set.total(sums)
        means = totals["h"] / totals["n"].clamp(min=1).unsqueeze(1)  # [C, d]
        return Answer({"C": means, "counts": totals["n"]})

    def step(self, server: Server) -> Change:
        """C_c = sum_k n_kc / n_c C_kc."""
        upload, state = server.replies.upload, server.state
        counts = upload["counts"]
        n = counts if self.weights == "size" else (counts > 0).to(counts.dtype)
        total = added(n)  # [C]
        means = added(n.unsqueeze(2) * upload["C"]) / total.clamp(min=1).unsqueeze(1)
        there = total > 0
        return Change(
            {
                "C": torch.where(there.unsqueeze(1), means, state["C"]),
                "known": torch.where(there, torch.ones_like(state["known"]), state["known"]),
            }
        )
