"""FedNNNN.
Nagura, Bian, Sato: FedNNNN: Norm-Normalized Neural Network Aggregation for Fast and Accurate
Federated Learning, 2020. https://arxiv.org/abs/2008.04538

Algorithm 3 with eqs. 4-5 and 12-13. `variant` has the two halves that table 2 compares: "norm_norm"
is eq. 8 (gamma = 0), "momentum" is eqs. 10-11 (no E / N, no beta). q_k = 1/m: "n_k/n = 1/n"
(section 5.1) is a misprint, n counts samples. Choices and their options:
- The evaluated model is the plain average (step 4 of figure 5), the sent model is the result of
  step 6. The paper says so for FedNNNN only, here all three do so. `evaluate="sent"` is the usual
  reading of server momentum.
- Norms take all trainable parameters as one vector; the paper is silent. `norm="per_layer"`: each
  layer has its own E / N. Parameters with the same name before the last dot form a layer, so a
  batch norm's affine pair is one. `norm="with_buffers"`: norms include the changes of the buffers.
  Buffers are averaged in any case.
- N is near 0 if it is at most 64 eps max(1, E) with the dtype's eps. The paper then returns w_t as
  is; it says so before it adds momentum. Here the normalised term is dropped and the momentum goes
  on, the same if gamma = 0. `n_zero="hold"`: w and d stay as they are. Where clients cancel,
  rounding leaves noise in N. The sum leaves about eps E. The S local steps of m clients leave about
  eps/3 ||w|| sqrt(S/m) for any E, so the bound does not go to 0 with E. The factor 64 covers ||w||
  sqrt(S/m) up to 200. In float32 the bound is 8e-6 for E up to 1: 40 times the noise that we
  measured with ||w|| = 5, S = 36, m = 20 (2e-7, at any E from 1e-3 to 1). Unrelated updates of m
  clients give N = E / sqrt(m): with m = 100 they are above the bound if E is above 8e-5.

N (eq. 4), E (eq. 5) and E / N (0 where N is near 0) are recorded, by layer with "per_layer". The N
of figures 8 and 9 is ||w_{t+1} - w_t||, which is recorded for every recipe. Meeting others: u is
the aggregated update. Its clients may be refined or re-weighted, and another method may average.
q_k are the clients' final weights, so N <= E unless a method stretches the average. The evaluated
model is w_t + u. FedML pair: `FedNNNNTrainer`, `FedNNNNAggregator`.
"""

from __future__ import annotations

from collections.abc import Iterable
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
from fedml_noniid.core.sums import weighted_mean
from fedml_noniid.core.trees import Params, Tree, add, norm, row_norms, sub, tree_map, zeros_like


@dataclass(frozen=True)
class FedNNNN(Component):
    """Stretches the average update to the mean length of the clients' updates, with momentum."""

    name: ClassVar[str] = "fednnnn"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.SERVER_STEP})
    weights: ClassVar[Weights] = "uniform"

    # table 5, MNIST, non-IID, balanced, with 1.0 for "norm_norm"; not used by "momentum"
    beta: Positive = 0.7
    # table 5, MNIST, non-IID, balanced, with 0.9 for "momentum"; not used by "norm_norm"
    gamma: Momentum = 0.8
    variant: Literal["fednnnn", "norm_norm", "momentum"] = "fednnnn"
    # not used by "momentum", which divides by nothing
    n_zero: Literal["skip_term", "hold"] = "skip_term"
    # with "momentum", it changes the records only
    norm: Literal["all", "per_layer", "with_buffers"] = "all"
    evaluate: Literal["average", "sent"] = "average"  # section 4.1

    @property
    def needs(self) -> Needs:
        models = self.norm == "with_buffers"
        return Needs(replies=Replies.MODELS if models else Replies.SCALARS)

    def init_server(self, server: Server) -> Tree:
        """d_0 = 0."""
        return {"d": zeros_like(server.params)}

    def step(self, server: Server) -> Change:
        """Lines 9-12: d <- gamma d + beta (E / N) u; w <- w + d.

        Eq. 8: gamma = 0. Eqs. 10-11: d <- gamma d + u.
        """
        gamma = 0.0 if self.variant == "norm_norm" else self.gamma
        n, e, d, moved = {}, {}, {}, {}
        for layer, names in self.layers(server.update).items():
            n[layer], e[layer] = self.lengths(server, names)
            stays = near_zero(n[layer], e[layer]) & (
                self.n_zero == "hold" and self.variant != "momentum"
            )
            factor = 1.0 if self.variant == "momentum" else self.beta * ratio(n[layer], e[layer])
            for name in names:
                before, u = server.state["d"][name], server.update[name]
                d[name] = torch.where(stays, before, gamma * before + factor * u)
                moved[name] = torch.where(stays, 0 * u, d[name])
        columns = {"N": n, "E": e, "ratio": tree_map(ratio, n, e)}
        return Change(
            {"d": d},
            add(server.params, moved),
            evaluated=add(server.params, server.update) if self.evaluate == "average" else None,
            metrics=columns
            if self.norm == "per_layer"
            else {key: of["model"] for key, of in columns.items()},
        )

    def layers(self, names: Iterable[str]) -> dict[str, list[str]]:
        """The parameters of each norm, by layer; "model" for all of them."""
        by_layer: dict[str, list[str]] = {}
        for name in names:
            by_layer.setdefault(
                name.rpartition(".")[0] if self.norm == "per_layer" else "model", []
            ).append(name)
        return by_layer

    def lengths(self, server: Server, names: Iterable[str]) -> tuple[Tensor, Tensor]:
        """N = ||u|| (eq. 4) and E = sum_k q_k ||w_k - w_t|| (eq. 5) of the parameters `names`,
        0-d."""
        u: Params = {name: server.update[name] for name in names}
        deltas: Params = {name: server.replies.deltas[name] for name in names}
        if self.norm == "with_buffers":
            moved = sub(server.replies.buffers, server.buffers)  # [M, ...]
            u, deltas = u | weighted_mean(server.omega, moved), deltas | moved
        each = row_norms(deltas)  # [M]
        return norm(u), server.weights.to(each.dtype) @ each


def near_zero(n: Tensor, e: Tensor) -> Tensor:
    """Whether N is "0 or close to 0" (section 4.2), 0-d: it may be the rounding error of updates
    that cancel."""
    return n <= 64 * torch.finfo(n.dtype).eps * e.clamp(min=1)


def ratio(n: Tensor, e: Tensor) -> Tensor:
    """E / N; 0 where N is near 0."""
    small = near_zero(n, e)
    return torch.where(small, torch.zeros_like(n), e / torch.where(small, torch.ones_like(n), n))
