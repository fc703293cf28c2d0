"""FedNLR.
Wang, Zheng, Han, Xu, Li, Zhang: FedNLR: Federated Learning with Neuron-wise Learning Rates, KDD
2024. https://doi.org/10.1145/3637528.3672042

Algorithm 1 with eqs. 14-18. Choices where the paper is silent or unclear, and their options:
- The denominator of eq. 15 is 1, so the rate of a neuron is eta M_l q: on average eta.
  `scale="sum1"` is lemma 4's eta q, which sums to eta over the layer.
- (a1, a2) = (0.45, 0.3) are those of the main tables. Section 7.3 ends with (1, 1); its printed 1/L
  is read as l/L. The paper gives no mu_0 for them. It is 1, since mu_l must exceed 1. `mu` sets
  single layers, as in figure 4.
- The logarithm is base 10 (section 7.3).
- M_l of a convolution is its number of channels, each averaged over space before any pooling.
  `M="units"` counts C H W in eq. 17; there is still one rate per channel.
- The classifier is scaled too, by its mean logits (figure 4 has nine layers).
- Biases and batch-norm pairs have the rates of their rows.
- The paper says that rates differ more where T_l is higher. It is the reverse: they differ more
  where mu_l is larger.
- If all hbar are equal, or mu_l <= 1, every neuron keeps eta, also with "sum1".
- `since`: the first round in which rates differ. Earlier rounds are FedAvg's. Table 4 trains one
  FedAvg model both ways.

The factors scale the optimiser's update. For plain SGD this is eq. 18; it also holds for momentum
and Adam. Meeting others: the factors multiply the whole local update, with the terms that FedProx,
FedDyn, FedDC or SCAFFOLD add to the gradient. SCAFFOLD's c_i divides by eta, not by the neurons'
rates. FedNova's a_i counts the steps taken. FedBABU's frozen head is not scaled, but stays layer L.
The "weight decay 0.1" that section 7.1 gives FedDyn is FedDyn's own alpha: don't add both.
`drift.py` records neuron drift. FedML pair: `FedNLRTrainer`, `FedNLRAggregator`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedml_noniid.core.component import (
    Answer,
    Client,
    Component,
    Exclusive,
    Needs,
    Public,
    Server,
    Setting,
    Trace,
)
from fedml_noniid.core.data import Batch
from fedml_noniid.core.errors import UserError, among
from fedml_noniid.core.options import Count, NonNegative, RecipeError
from fedml_noniid.core.task import Layer, Task
from fedml_noniid.core.trees import Params, Tree
from fedml_noniid.plugins.fednlr.drift import recorded


@dataclass(frozen=True)
class FedNLR(Component):
    """Trains each neuron at a rate that grows with its activation on the local data under the
    received model."""

    name: ClassVar[str] = "fednlr"
    needs: ClassVar[Needs] = Needs(local_set=True, public=Public.RECORDED, activations=True)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.NEURON_RATES})

    mu0: NonNegative = 1.0
    a1: NonNegative = 0.45  # section 7.3, the main experiments
    a2: NonNegative = 0.3
    mu: str = ""  # mu_l of single layers in place of eq. 17: "conv1=2 fc1=1.75"
    scale: Literal["mean1", "sum1"] = "mean1"  # section 7.3
    M: Literal["channels", "units"] = "channels"
    since: Count = 1  # rounds

    def check(self, setting: Setting) -> None:
        names = [name for name, _ in self.mu_pairs()]
        if len(set(names)) < len(names):
            raise RecipeError(f"fednlr: mu = {self.mu!r} names a layer twice")

    def mu_pairs(self) -> list[tuple[str, float]]:
        """The pairs of `mu`. RecipeError for a word that is not a pair."""
        pairs = []
        for word in self.mu.split():
            name, _, number = word.partition("=")
            try:
                value = float(number)
            except ValueError:
                value = math.nan
            if not (name and math.isfinite(value) and value >= 1):
                raise RecipeError(
                    f"fednlr: mu = {self.mu!r} has {word!r}; must be layer=number with blanks "
                    "between the pairs only, "
                    "such as 'conv1=2 fc1=1.75', each number finite and at least 1"
                )
            pairs.append((name, value))
        return pairs

    def scaled(self, task: Task, params: Params) -> dict[int, Layer]:
        """The layers that are scaled, by l = 1..L: those with trained parameters."""
        return {
            depth: layer
            for depth, layer in enumerate(task.network.layers, start=1)
            if any(name in params for name in layer.parameters)
        }

    def init_server(self, server: Server) -> Tree:
        """No state. UserError if `mu` names a layer that is not scaled."""
        names = [layer.name for layer in self.scaled(server.task, server.params).values()]
        if unknown := [name for name, _ in self.mu_pairs() if name not in names]:
            raise UserError(
                f"fednlr: mu = {self.mu!r} names {', '.join(map(repr, unknown))}, which "
                f"{server.task.network.name!r} has no scaled layer for",
                **among(unknown[0], names),
            )
        return {}

    def activations(self, client: Client) -> dict[Layer, tuple[Tensor, float]]:
        """Lines 5-6: of each scaled layer, hbar_l [M_l] (eq. 14) and mu_l (eq. 17)."""
        task, means = client.task, {}

        def h(batch: Batch) -> Tree:  # leaves [B, M_l], of a convolution [B, M_l, H, W]
            return task.activations(client.params, client.buffers, batch.x)

        hbar, handed = client.local_set.mean(h), dict(self.mu_pairs())
        for l, layer in self.scaled(task, client.params).items():  # noqa: E741, the paper's letter
            mean = hbar[layer.name]
            mu = self.ratio(
                l, len(task.network.layers), mean.numel() if self.M == "units" else layer.units
            )
            means[layer] = (
                mean.flatten(1).mean(1) if mean.ndim > 1 else mean,
                handed.get(layer.name, mu),
            )
        return means

    def ratio(self, l: int, n_layers: int, units: int) -> float:  # noqa: E741, the paper's letter
        """Eq. 17: mu_l = mu_0 + a1 l / L + a2 log M_l, with l = 1..L."""
        return self.mu0 + self.a1 * l / n_layers + self.a2 * math.log10(units)

    def factors(self, h: Tensor, mu: float) -> Tensor:
        """Eqs.

        15-16: M q with q = softmax(h / T), T = (max h - min h) / ln mu; [M] -> [M], mean 1, max /
        min = mu.
        """
        spread = h.max() - h.min()
        if mu <= 1:
            return torch.ones_like(h)
        flat = spread <= 0
        # The smallest is subtracted, so that rounding does not hide small differences of large
        # activations.
        share = (h - h.min()) / torch.where(flat, torch.ones_like(spread), spread)  # 0 to 1
        q = torch.softmax(share * math.log(mu), dim=0)
        return torch.where(flat, torch.ones_like(h), q * (len(h) if self.scale == "mean1" else 1))

    def prepare(self, client: Client) -> Tree:
        """Lines 5-8: the factor of every neuron, by parameter; none before `since`."""
        factors: Params = {}
        if client.round >= self.since:
            for layer, (h, mu) in self.activations(client).items():
                names = [name for name in layer.parameters if name in client.params]
                factors |= dict.fromkeys(names, self.factors(h, mu))
        return factors

    def update_factor(self, client: Client) -> Params:
        """Eq. 18: the rate of row m is eta times its factor."""
        return client.prepared

    def report(self, trace: Trace, client: Client) -> Answer:
        """Recorded, by scaled layer: T_l (figure 3; NaN if mu_l <= 1), mu_l, the factors in force
        and their range."""
        if not client.observing:
            return Answer()
        quantities: Tree = {"T": {}, "mu": {}, "factor": {}, "smallest": {}, "largest": {}}
        for layer, (h, mu) in self.activations(client).items():
            spread = h.max() - h.min()
            factor = self.factors(h, mu) if client.round >= self.since else torch.ones_like(h)
            values = (
                spread / math.log(mu) if mu > 1 else spread * math.nan,
                torch.full_like(spread, mu),
            )
            for quantity, value in zip(
                quantities, (*values, factor, factor.min(), factor.max()), strict=True
            ):
                quantities[quantity][layer.name] = value
        return Answer(metrics=quantities | recorded(trace, client))
