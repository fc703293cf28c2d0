"""FedNNNN. Nagura, Bian, Sato: FedNNNN: Norm-Normalized Neural Network Aggregation for Fast and Accurate
Federated Learning, 2020. https://arxiv.org/abs/2008.04538

Algorithm 3 with eqs. 4-5 and 12-13; q_k = 1/m ("n_k/n = 1/n", section 5.1, is a misprint: n is a count of samples).
- Evaluated is the plain average (step 4 of figure 5), sent is the normalised one (step 6).
- Norms are over all trainable parameters as one vector, on which the paper is silent; buffers are averaged.
- N near 0: the paper returns w_t as is, written before it adds momentum; here the normalised term is dropped and the
  momentum goes on, which is the same when gamma = 0.

Meeting others: u is the direction that the other components leave (a refined or re-weighted average), and q_k are
their weights, so that N <= E holds. FedML pair: `FedNNNNTrainer`, `FedNNNNAggregator`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from plugins.core.component import Component, Desk, RecipeError, Setting, Stage, Update
from plugins.core.trees import Params, Tree, norm, row_norms, tree_map, zeros_like


@dataclass(frozen=True)
class FedNNNN(Component):
    """Stretches the average update to the mean length of the clients' updates, with momentum."""

    name: ClassVar[str] = "fednnnn"
    stage: ClassVar[Stage] = Stage.SCALE
    claims: ClassVar[frozenset[str]] = frozenset({"server step"})
    weighting: ClassVar[str] = "uniform"
    evaluates_average: ClassVar[bool] = True

    beta: float = 0.7  # table 5, MNIST, non-IID, balanced
    gamma: float = 0.8

    def check(self, setting: Setting) -> None:
        if not self.beta > 0:
            raise RecipeError(f"fednnnn: beta = {self.beta} must be above 0")
        if not 0 <= self.gamma < 1:
            raise RecipeError(f"fednnnn: gamma = {self.gamma} must lie in [0, 1)")

    def init_server(self, params: Params, desk: Desk) -> Tree:
        return {"d": zeros_like(params)}

    def step(self, direction: Params, state: Tree, update: Update) -> tuple[Params, Tree]:
        """Lines 9-12: d <- gamma d + beta (E / N) u; w <- w + d."""
        length = row_norms(update.deltas)  # [M]
        e = (update.weights.to(length.dtype) * length).sum()
        n = norm(direction)
        tiny = n <= 1e-12 * e.clamp(min=1)
        factor = torch.where(tiny, torch.zeros_like(n), self.beta * e / torch.where(tiny, torch.ones_like(n), n))
        d = tree_map(lambda d, u: self.gamma * d + factor * u, state["d"], direction)
        return d, {"d": d}
