"""FedNLR. Wang, Zheng, Han, Xu, Li, Zhang: FedNLR: Federated Learning with Neuron-wise Learning Rates, KDD 2024.
https://doi.org/10.1145/3637528.3672042

Algorithm 1 with eqs. 14-18. Choices where the paper is silent or unclear:
- The denominator of eq. 15 is 1, so the rate of a neuron is eta M_l q: on average eta.
- (a1, a2) = (0.45, 0.3) are those of the main tables; mu_0 is never given for them and is 1, since mu_l must exceed 1.
- The logarithm is base 10 (section 7.3). M_l of a convolution is its number of channels, each averaged over space.
- The classifier is scaled too, by its mean logits (figure 4 has nine layers); bias and batch-norm pairs as their rows.
- "A larger T_l indicates a larger discrepancy" is the wrong way round; a larger mu_l does.
- hbar all equal, or mu_l <= 1: every neuron keeps eta.

The factors scale the optimiser's update, which for plain SGD is eq. 18; so they hold under momentum, weight decay and
Adam, and multiply whatever other components add to the gradient. FedML pair: `FedNLRTrainer`, `FedNLRAggregator`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from plugins.core.component import Batch, Component, Data, RecipeError, Setting, Stage, View
from plugins.core.task import Task
from plugins.core.trees import Params, Tree


@dataclass(frozen=True)
class FedNLR(Component):
    """Trains each neuron at a rate that grows with its activation on the local data under the received model."""

    name: ClassVar[str] = "fednlr"
    stage: ClassVar[Stage] = Stage.SCALE
    claims: ClassVar[frozenset[str]] = frozenset({"neurons' learning rates"})
    passes: ClassVar[frozenset[str]] = frozenset({"own"})

    mu0: float = 1.0
    a1: float = 0.45
    a2: float = 0.3

    def check(self, setting: Setting) -> None:
        for key, value in (("mu0", self.mu0), ("a1", self.a1), ("a2", self.a2)):
            if not (math.isfinite(value) and value >= 0):
                raise RecipeError(f"fednlr: {key} = {value} must be a finite number of at least 0")

    def mu(self, l: int, n_layers: int, units: int) -> float:  # noqa: E741, the paper's letter
        """Eq. 17: mu_l = mu_0 + a1 l / L + a2 log10 M_l, with l = 1..L."""
        return self.mu0 + self.a1 * l / n_layers + self.a2 * math.log10(units)

    def prepare(self, task: Task, view: View, data: Data) -> Tree:
        """Lines 5-8: the factor M_l q_l of every neuron, by parameter."""
        assert data.own is not None

        def sums(batch: Batch) -> Tree:
            found = task.activations(view.start, view.buffers, batch.x)
            per_sample = {name: h.flatten(2).mean(2) if h.ndim > 2 else h for name, h in found.items()}  # [B, M_l]
            mask = None if batch.mask is None else batch.mask
            return {n: h.sum(0) if mask is None else mask.to(h.dtype) @ h for n, h in per_sample.items()}

        mean = data.own.mean(sums)  # eq. 14
        factors: Tree = {}
        for l, layer in enumerate(task.network.layers, start=1):  # noqa: E741, the paper's letter
            scale = self.factors(mean[layer.name], self.mu(l, len(task.network.layers), layer.units))
            factors.update(dict.fromkeys(layer.parameters, scale))
        return factors

    @staticmethod
    def factors(h: Tensor, mu: float) -> Tensor:
        """Eqs. 15-16: M q with q = softmax(h / T), T = (max h - min h) / ln mu; [M] -> [M], mean 1, max / min = mu."""
        spread = h.max() - h.min()
        if mu <= 1:
            return torch.ones_like(h)
        flat = spread <= 0
        # From the smallest, so that activations that hardly differ are not lost beside their size.
        share = (h - h.min()) / torch.where(flat, torch.ones_like(spread), spread)  # 0 to 1
        q = torch.softmax(share * math.log(mu), dim=0)
        return torch.where(flat, torch.ones_like(h), h.shape[0] * q)

    def correct(self, tree: Params, params: Params, view: View) -> Params:
        """Eq. 18: the rate of row m is eta times its factor."""
        factors = view.prepared
        return {
            key: update * factors[key].reshape(-1, *(1,) * (update.ndim - 1)) if key in factors else update
            for key, update in tree.items()
        }
