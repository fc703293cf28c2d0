"""FedNNNN.
Nagura, Bian, Sato: FedNNNN: Norm-Normalized Neural Network Aggregation for Fast and Accurate
Federated Learning, 2020. https://arxiv.org/abs/2008.04538

Algorithm 3 with eqs. 4-5 and 12-13. `variant` has the two halves that table 2 compares: "norm_norm"
is eq. 8 (gamma = 0), "momentum" is eqs. 10-11 (no E / N, no beta). q_k = 1/m: "n_k/n = 1/n"
(section 5.1) is a misprint, n counts samples. Choices:
- The evaluated model is the plain average (step 4 of figure 5), the sent model is the result of
  step 6. The paper says so for FedNNNN only, here all three do so. `evaluate="sent"` is the usual
  reading of server momentum.
- Norms take all trainable parameters as one vector, without buffers; the paper is silent.
- N is near 0 if it is at most 64 eps max(1, E) with the dtype's eps. The paper then returns w_t as
  is; it says so before it adds momentum. Here the normalised term is dropped and the momentum goes
  on, the same if gamma = 0. Where clients cancel, rounding leaves noise in N. The sum leaves about
  eps E. The S local steps of m clients leave about eps/3 ||w|| sqrt(S/m) for any E, so the bound
  does not go to 0 with E. The factor 64 covers ||w|| sqrt(S/m) up to 200. In float32 the bound is
  8e-6 for E up to 1: 40 times the noise that we measured with ||w|| = 5, S = 36, m = 20 (2e-7, at
  any E from 1e-3 to 1). Unrelated updates of m clients give N = E / sqrt(m): with m = 100 they are
  above the bound if E is above 8e-5.

N (eq. 4), E (eq. 5) and E / N (0 where N is near 0) are recorded. The N of figures 8 and 9 is
||w_{t+1} - w_t||, which is recorded for every recipe. Meeting others: u is the aggregated update.
Its clients may be refined or re-weighted, and another method may average. q_k are the clients'
final weights, so N <= E unless a method stretches the average. The evaluated model is w_t + u.
FedML pair: `FedNNNNTrainer`, `FedNNNNAggregator`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedml_noniid.core.component import (
    Change,
    Component,
    Exclusive,
    Needs,
    Replies,
    Server,
    Weights,
)
from fedml_noniid.core.options import Momentum, Positive
from fedml_noniid.core.trees import Tree, add, norm, row_norms, tree_map, zeros_like


@dataclass(frozen=True)
class FedNNNN(Component):
    """Stretches the average update to the mean length of the clients' updates, with momentum."""

    name: ClassVar[str] = "fednnnn"
    needs: ClassVar[Needs] = Needs(replies=Replies.SCALARS)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.SERVER_STEP})
    weights: ClassVar[Weights] = "uniform"

    # table 5, MNIST, non-IID, balanced, with 1.0 for "norm_norm"; not used by "momentum"
    beta: Positive = 0.7
    # table 5, MNIST, non-IID, balanced, with 0.9 for "momentum"; not used by "norm_norm"
    gamma: Momentum = 0.8
    variant: Literal["fednnnn", "norm_norm", "momentum"] = "fednnnn"
    evaluate: Literal["average", "sent"] = "average"  # section 4.1

    def init_server(self, server: Server) -> Tree:
        """d_0 = 0."""
        return {"d": zeros_like(server.params)}

    def step(self, server: Server) -> Change:
        """Lines 9-12: d <- gamma d + beta (E / N) u; w <- w + d. N = ||u|| (eq. 4).

        Eq. 8: gamma = 0. Eqs. 10-11: d <- gamma d + u.
        """
        gamma = 0.0 if self.variant == "norm_norm" else self.gamma
        n, e = norm(server.update), self.mean_length(server)
        factor = 1.0 if self.variant == "momentum" else self.beta * ratio(n, e)
        d = tree_map(lambda d, u: gamma * d + factor * u, server.state["d"], server.update)
        return Change(
            {"d": d},
            add(server.params, d),
            evaluated=add(server.params, server.update) if self.evaluate == "average" else None,
            metrics={"N": n, "E": e, "ratio": ratio(n, e)},
        )

    def mean_length(self, server: Server) -> Tensor:
        """E = sum_k q_k ||w_k - w_t|| (eq. 5), 0-d."""
        lengths = row_norms(server.replies.deltas)  # [M]
        mean: Tensor = server.weights.to(lengths.dtype) @ lengths
        return mean


def near_zero(n: Tensor, e: Tensor) -> Tensor:
    """Whether N is "0 or close to 0" (section 4.2), 0-d: it may be the rounding error of updates
    that cancel."""
    return n <= 64 * torch.finfo(n.dtype).eps * e.clamp(min=1)


def ratio(n: Tensor, e: Tensor) -> Tensor:
    """E / N; 0 where N is near 0."""
    small = near_zero(n, e)
    return torch.where(small, torch.zeros_like(n), e / torch.where(small, torch.ones_like(n), n))
