"""CCN: client contribution normalization. Kundalwal, Saraswat, Mishra, Mishra: Client Contribution Normalization for
Enhanced Federated Learning, 2024. https://arxiv.org/abs/2411.06352

Eqs. 3-8. Choices where the paper is silent or double:
- z_r is computed after local training, over the whole local set, in one extra evaluation pass; Algorithm 1 lists it
  before and again in the last epoch, which overwrites it.
- z_r is the post-ReLU input of the classifier.
- T = 0.5; the paper says only "less than 1".
- nu_r are the weights of the method that it is combined with: n_r/n, or 1/m for SCAFFOLD and FedNNNN.

FedML pair: `CCNTrainer`, `CCNAggregator`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from plugins.core.client import mean_features
from plugins.core.component import Component, Data, RecipeError, Reply, Setting, Stage, Trace, View
from plugins.core.task import Task
from plugins.core.trees import Tree


@dataclass(frozen=True)
class CCN(Component):
    """Weighs a client the less, the more its mean representation resembles those of the others."""

    name: ClassVar[str] = "ccn"
    stage: ClassVar[Stage] = Stage.SCALE
    claims: ClassVar[frozenset[str]] = frozenset({"clients' weights"})
    passes: ClassVar[frozenset[str]] = frozenset({"own"})

    T: float = 0.5  # temperature, eq. 8

    def check(self, setting: Setting) -> None:
        if not self.T > 0:
            raise RecipeError(f"ccn: T = {self.T} must be above 0")

    def report(self, task: Task, trace: Trace, view: View, data: Data) -> tuple[Tree, Tree]:
        """z_r, the mean of the final hidden layer over the local data, [d] (section III-A)."""
        return {"z": mean_features(task, trace.end, trace.buffers, data.own)}, view.memory

    def weigh(self, weights: Tensor, replies: Reply) -> Tensor:
        """Eqs. 6-7: Lambda_r nu_r / (Lambda . nu)."""
        product = self.contribution(replies.upload[self.name]["z"]).to(weights.dtype) * weights
        return product / product.sum()

    def contribution(self, z: Tensor) -> Tensor:
        """Lambda_r of eq. 8, [R, d] -> [R]; 1 for a single client. The cosine with a zero vector is 0."""
        if z.shape[0] == 1:
            return z.new_ones(1)
        z = z.double()
        length = torch.linalg.vector_norm(z, dim=1, keepdim=True)
        unit = z / torch.where(length > 0, length, torch.ones_like(length))
        similarity = (unit @ unit.T).fill_diagonal_(1.0)  # eqs. 3-4
        # Row sums reach R/T, so the exponentials are shifted: softmax does that.
        return 1 - torch.softmax(similarity.sum(1) / self.T, dim=0)
