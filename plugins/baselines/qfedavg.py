"""q-FedAvg. Li, Sanjabi, Beirami, Smith: Fair Resource Allocation in Federated Learning, ICLR 2020.
https://arxiv.org/abs/1905.10497

Algorithm 2 with the authors' code (https://github.com/litian96/fair_flearn) where the paper is silent:
- F_k is the mean cross-entropy of the received model over all local data, in eval mode, plus 1e-10.
- L = 1/eta, with the step size of local training. eta is taken at its word under Adam and RMSProp too, where it is no
  longer a bound on the curvature: rFedAvg compares q-FedAvg with RMSProp (Sent140).
- Clients are drawn uniformly, not in proportion to n_k, and count the same: q = 0 is their uniform average.
- Norms are over all trainable parameters as one vector; buffers are averaged.

Meeting others: the sums over k carry the clients' weights c_k, which is the paper when they are uniform; CCN's take
effect there. Delta_k is what the clients send, refined by FNR-FL where that was; F_k has no terms of other methods.
Its FedML pair is `make_pair("qfedavg")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F

from plugins.core.component import Batch, Component, Data, RecipeError, Setting, Trace, Update, View
from plugins.core.task import Task
from plugins.core.trees import Params, Tree, row_norms, weighted_sum


@dataclass(frozen=True)
class QFedAvg(Component):
    """Counts a client the more, the higher its loss, with a step size that follows."""

    name: ClassVar[str] = "qfedavg"
    claims: ClassVar[frozenset[str]] = frozenset({"clients' average"})
    passes: ClassVar[frozenset[str]] = frozenset({"own"})
    weighting: ClassVar[str] = "uniform"

    lr: float  # eta
    q: float = 1.0  # rFedAvg, section VI-A; there 1e-4 on Sent140

    def check(self, setting: Setting) -> None:
        if not self.q >= 0:
            raise RecipeError(f"qfedavg: q = {self.q} must be at least 0")

    def report(self, task: Task, trace: Trace, view: View, data: Data) -> tuple[Tree, Tree]:
        """F_k(w_t)."""
        assert data.own is not None

        def sums(batch: Batch) -> Tree:
            logits = task.forward(view.start, view.buffers, batch.x, train=False).logits
            losses = F.cross_entropy(logits, batch.y, reduction="none")  # [B]
            return {"F": losses.sum() if batch.mask is None else batch.mask.to(losses.dtype) @ losses}

        return data.own.mean(sums), view.memory

    def average(self, update: Update) -> Params:
        """-sum_k Delta_k / sum_k h_k, Delta_k = F_k^q L (w - w_k), h_k = q F_k^(q-1) ||L (w - w_k)||^2 + L F_k^q."""
        big_l = 1 / self.lr
        f = update.replies.upload[self.name]["F"].double() + 1e-10  # [M]
        # Both sums have a factor F^q: as a share of the largest, so that no power underflows.
        power = update.weights * (f / f.max()) ** self.q
        square = (big_l * row_norms(update.deltas).double()) ** 2
        h = power * (self.q * square / f + big_l)
        return weighted_sum(power * big_l / h.sum(), update.deltas)
