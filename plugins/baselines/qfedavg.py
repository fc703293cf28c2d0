"""q-FedAvg. Li, Sanjabi, Beirami, Smith: Fair Resource Allocation in Federated Learning, ICLR 2020.
https://arxiv.org/abs/1905.10497

Algorithm 2 with the authors' code (https://github.com/litian96/fair_flearn) where the paper is
silent:
- F_k is the mean loss of the received model over all local data, in eval mode, plus 1e-10.
- L = 1/eta, where eta is the local step size. This holds for Adam and RMSProp too, although L no
  longer bounds the curvature there: rFedAvg compares q-FedAvg with RMSProp (Sent140).
- Clients are drawn uniformly, not in proportion to n_k, and have equal weights: q = 0 is their
  uniform average.
- Norms take all trainable parameters as one vector. Buffers are averaged.

Meeting others: the sums over k have the clients' weights c_k as factors. Uniform weights give the
paper's sums; CCN's weights act there. Delta_k is the sent update, or the refined one (FNR-FL). F_k
has no terms of other methods. Its FedML pair is `make_pair("qfedavg")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import (
    Answer,
    Client,
    Component,
    Exclusive,
    Needs,
    Replies,
    Server,
    Trace,
    Weights,
)
from fedml_noniid.core.data import Batch
from fedml_noniid.core.options import NonNegative, Range
from fedml_noniid.core.sums import weighted_sum
from fedml_noniid.core.trees import Params, Tree, row_norms


@dataclass(frozen=True)
class QFedAvg(Component):
    """Gives clients with a higher loss more weight, and adapts the step size."""

    name: ClassVar[str] = "qfedavg"
    needs: ClassVar[Needs] = Needs(local_set=True, replies=Replies.SCALARS)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.AVERAGE})
    ranges: ClassVar[Mapping[str, Range]] = {"F": Range(0)}  # h_k divides by it, to the power of q
    weights: ClassVar[Weights] = "uniform"

    q: NonNegative = 1.0  # rFedAvg, section VI-A; there 1e-4 on Sent140

    def report(self, trace: Trace, client: Client) -> Answer:
        """F_k(w_t)."""

        def losses(batch: Batch) -> Tree:
            return {
                "F": client.task.loss.values(
                    client.task.eval(client.params, client.buffers, batch.x).logits, batch.y
                )
            }

        return Answer(client.local_set.mean(losses))

    def average(self, server: Server) -> Params:
        """-sum_k Delta_k / sum_k h_k, Delta_k = F_k^q L (w - w_k), h_k = q F_k^(q-1) ||L (w -
        w_k)||^2 + L F_k^q."""
        deltas, big_l = server.replies.deltas, 1 / server.task.lr
        f = server.replies.upload["F"].double() + 1e-10  # [M]
        # Both sums have a factor F^q. F is divided by the largest F, so that no power underflows.
        power = server.weights * (f / f.max()) ** self.q
        h = power * (self.q * (big_l * row_norms(deltas).double()) ** 2 / f + big_l)
        return weighted_sum(power * big_l / h.sum(), deltas)
