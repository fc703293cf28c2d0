"""FedNNNN. Nagura, Bian, Sato: FedNNNN: Norm-Normalized Neural Network Aggregation for Fast and Accurate
Federated Learning, 2020. https://arxiv.org/abs/2008.04538

Algorithm 3 with eqs. 4-5 and 12-13; `variant` has the two halves that table 2 compares: "norm_norm" is eq. 8, which is
gamma = 0, and "momentum" eqs. 10-11, without E / N and beta. q_k = 1/m: "n_k/n = 1/n" (section 5.1) is a misprint, n
counts samples. Choices, and the options beside them:
- Evaluated is the plain average (step 4 of figure 5), sent is what step 6 makes of it; the paper says so for FedNNNN
  only, here it is so for all three. `evaluate="sent"` is the usual reading of server momentum.
- Norms are over all trainable parameters as one vector, on which the paper is silent. `norm="per_layer"`: each layer
  has its own E / N. A layer is what shares a name before the last dot, so a batch norm's affine pair is one.
  `norm="with_buffers"`: norms include what the clients moved the buffers by. Buffers are averaged in any case.
- N near 0, at most 64 eps max(1, E) with the dtype's eps: the paper returns w_t as is, written before it adds momentum.
  Here the normalised term is dropped and the momentum goes on, the same when gamma = 0. `n_zero="hold"`: w and d stay
  as they are. Where clients cancel, rounding leaves noise in N. The sum leaves about eps E. The S local steps of m
  clients leave about eps/3 ||w|| sqrt(S/m), however small E is, so the bound does not go to 0 with E. The factor 64
  covers ||w|| sqrt(S/m) up to 200. In float32 the bound is 8e-6 for E up to 1: 40 times the noise that we measured with
  ||w|| = 5, S = 36, m = 20 (2e-7, at any E from 1e-3 to 1). Updates of m clients that have nothing in common give
  N = E / sqrt(m): with m = 100 they are above the bound while E is above 8e-5.

Recorded are N (eq. 4), E (eq. 5) and E / N (0 where N is near 0), by layer with "per_layer"; figures 8 and 9 call
||w_{t+1} - w_t|| N, which is recorded for every recipe.
Meeting others: u is the aggregated update, of refined or re-weighted clients or by another method's average. q_k are
the clients' final weights, so N <= E as long as nothing stretches the average. Evaluated is w_t + u with that u.
FedML pair: `FedNNNNTrainer`, `FedNNNNAggregator`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from plugins.core.component import Change, Claim, Component, Server, Weights
from plugins.core.options import Momentum, Positive
from plugins.core.trees import Params, Tree, add, norm, row_norms, sub, tree_map, weighted_sum, zeros_like


@dataclass(frozen=True)
class FedNNNN(Component):
    """Stretches the average update to the mean length of the clients' updates, with momentum."""

    name: ClassVar[str] = "fednnnn"
    claims: ClassVar[frozenset[Claim]] = frozenset({Claim.SERVER_STEP})
    weights: ClassVar[Weights] = "uniform"

    beta: Positive = 0.7  # table 5, MNIST, non-IID, balanced; not used by "momentum", and 1.0 there for "norm_norm"
    gamma: Momentum = 0.8  # likewise; not used by "norm_norm", and 0.9 there for "momentum"
    variant: Literal["fednnnn", "norm_norm", "momentum"] = "fednnnn"
    n_zero: Literal["skip_term", "hold"] = "skip_term"  # not used by "momentum", which divides by nothing
    norm: Literal["all", "per_layer", "with_buffers"] = "all"  # with "momentum", only of what is recorded
    evaluate: Literal["average", "sent"] = "average"  # section 4.1

    def init_server(self, server: Server) -> Tree:
        """d_0 = 0."""
        return {"d": zeros_like(server.params)}

    def step(self, server: Server) -> Change:
        """Lines 9-12: d <- gamma d + beta (E / N) u; w <- w + d. Eq. 8: gamma = 0. Eqs. 10-11: d <- gamma d + u."""
        gamma = 0.0 if self.variant == "norm_norm" else self.gamma
        n, e, d, moved = {}, {}, {}, {}
        for layer, names in self.layers(server.update).items():
            n[layer], e[layer] = self.lengths(server, names)
            stays = near_zero(n[layer], e[layer]) & (self.n_zero == "hold" and self.variant != "momentum")
            factor = 1.0 if self.variant == "momentum" else self.beta * ratio(n[layer], e[layer])
            for name in names:
                before, u = server.state["d"][name], server.update[name]
                d[name] = torch.where(stays, before, gamma * before + factor * u)
                moved[name] = torch.where(stays, 0 * u, d[name])
        found = {"N": n, "E": e, "ratio": tree_map(ratio, n, e)}
        return Change(
            {"d": d},
            add(server.params, moved),
            evaluated=add(server.params, server.update) if self.evaluate == "average" else None,
            metrics=found if self.norm == "per_layer" else {key: of["model"] for key, of in found.items()},
        )

    def layers(self, names: Iterable[str]) -> dict[str, list[str]]:
        """The parameters that one norm is over, by layer; "model" for all of them."""
        found: dict[str, list[str]] = {}
        for name in names:
            found.setdefault(name.rpartition(".")[0] if self.norm == "per_layer" else "model", []).append(name)
        return found

    def lengths(self, server: Server, names: Iterable[str]) -> tuple[Tensor, Tensor]:
        """N = ||u|| (eq. 4) and E = sum_k q_k ||w_k - w_t|| (eq. 5) of the parameters `names`, 0-d."""
        u: Params = {name: server.update[name] for name in names}
        deltas: Params = {name: server.replies.deltas[name] for name in names}
        if self.norm == "with_buffers":
            moved = sub(server.replies.buffers, server.buffers)  # [M, ...]
            u, deltas = u | weighted_sum(server.weights, moved), deltas | moved
        each = row_norms(deltas)  # [M]
        return norm(u), server.weights.to(each.dtype) @ each


def near_zero(n: Tensor, e: Tensor) -> Tensor:
    """Whether N is "0 or close to 0" (section 4.2), 0-d: no more than rounding may leave where the clients cancel."""
    return n <= 64 * torch.finfo(n.dtype).eps * e.clamp(min=1)


def ratio(n: Tensor, e: Tensor) -> Tensor:
    """E / N; 0 where N is near 0."""
    small = near_zero(n, e)
    return torch.where(small, torch.zeros_like(n), e / torch.where(small, torch.ones_like(n), n))
