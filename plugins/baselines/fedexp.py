"""FedExP.
Jhunjhunwala, Wang, Joshi: FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023.
https://arxiv.org/abs/2301.09604. The authors' code: https://github.com/Divyansh03/FedExP

The server's step is longer the more the clients' updates disagree.
- The weights are 1 / M, as in the paper's formula. The authors' code weighs by samples
  (`weights="size"`).
- The code has M eps in place of eps, and multiplies eps by the square of its decay of eta_l in
  every round. Here eps is fixed, as in the paper.
- The evaluated model is the mean of the last two, as in the code: the iterates of long steps
  oscillate. The model that is sent is the last one. `evaluate="sent"` evaluates that.

Meeting others: Delta_k are the updates as they enter the average, refined and with CCN's weights.
Delta is the aggregated update, also where another method replaces the average. Its FedML pair is
`make_pair("fedexp")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fedml_noniid.core.component import (
    Change,
    Component,
    Exclusive,
    Needs,
    Replies,
    Server,
    Weights,
)
from fedml_noniid.core.options import Positive
from fedml_noniid.core.trees import add, norm, row_norms, scale


@dataclass(frozen=True)
class FedExP(Component):
    """Moves the server further where the clients disagree."""

    name: ClassVar[str] = "fedexp"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.SERVER_STEP})
    needs: ClassVar[Needs] = Needs(replies=Replies.SCALARS)

    eps: Positive = 1e-3  # the authors' code for CIFAR-10 and CIFAR-100; 0.1 for EMNIST
    weights: Weights = "uniform"
    evaluate: Literal["mean", "sent"] = "mean"

    def step(self, server: Server) -> Change:
        """eta_g = max(1, sum_k p_k ||Delta_k||^2 / 2 (||Delta||^2 + eps)); w <- w + eta_g Delta."""
        lengths = row_norms(server.replies.deltas)  # [M]
        mean = (server.weights * lengths.square()).sum()
        eta_g = (mean / (2 * (norm(server.update).square() + self.eps))).clamp(min=1)
        w = add(server.params, scale(eta_g, server.update))
        # The first round has no model before it to average with.
        both = self.evaluate == "mean" and server.round > 1
        evaluated = scale(0.5, add(server.params, w)) if both else None
        return Change(params=w, evaluated=evaluated, metrics={"eta_g": eta_g})
