"""FedNLR. Wang, Zheng, Han, Xu, Li, Zhang: FedNLR: Federated Learning with Neuron-wise Learning Rates, KDD 2024.
https://doi.org/10.1145/3637528.3672042

Algorithm 1 with eqs. 14-18. Choices where the paper is silent or unclear, and the options beside them:
- The denominator of eq. 15 is 1, so the rate of a neuron is eta M_l q: on average eta. `scale="sum1"` is lemma 4's
  eta q, which sums to eta over the layer.
- (a1, a2) = (0.45, 0.3) are those of the main tables; section 7.3 ends with (1, 1), where the printed 1/L is read as
  l/L. mu_0 is never given for them and is 1, since mu_l must exceed 1. `mu` sets single layers, as in figure 4.
- The logarithm is base 10 (section 7.3); `log="e"`.
- M_l of a convolution is its number of channels, each averaged over space before any pooling. `M="units"` counts C H W
  in eq. 17; rates are one per channel all the same.
- The classifier is scaled too, by its mean logits (figure 4 has nine layers). `last="prob"`: by its mean probabilities;
  `last="skip"`: not at all. L counts it in any case.
- Biases and batch-norm pairs move as their rows; `bias="unscaled"`: at eta.
- "A larger T_l indicates a larger discrepancy" is the wrong way round; a larger mu_l does.
- hbar all equal, or mu_l <= 1: every neuron keeps eta, also with "sum1".
- `since`: the first round in which rates differ; those before are FedAvg's. Table 4 trains one model of FedAvg both
  ways. The server then says with one number whether the round has come.

The factors scale the optimiser's update, which for plain SGD is eq. 18; so they hold under momentum and Adam.
Meeting others: they multiply the whole local update, with what FedProx, FedDyn, FedDC or SCAFFOLD add to the gradient.
SCAFFOLD's c_i divides by eta, not by the neurons' rates; FedNova's a_i is that of the steps taken. FedBABU's frozen
head is not scaled, but stays layer L. The "weight decay 0.1" that section 7.1 gives FedDyn is FedDyn's own alpha: don't
add both. Bound neurons (definition 1) and their drift need samples of all classes, which no client has: where a
simulation observes its clients, it takes the public split for that, which training does not touch.
FedML pair: `FedNLRTrainer`, `FedNLRAggregator`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from plugins.core.component import (
    Batch,
    Component,
    Data,
    Desk,
    Options,
    Plan,
    RecipeError,
    Setting,
    Stage,
    Trace,
    Update,
    View,
)
from plugins.core.errors import UserError, nearest
from plugins.core.task import Layer, Task
from plugins.core.trees import Params, Tree, leading
from plugins.fednlr.drift import bound, class_means, drift


@dataclass(frozen=True)
class FedNLR(Component):
    """Trains each neuron at a rate that grows with its activation on the local data under the received model."""

    name: ClassVar[str] = "fednlr"
    options: ClassVar[Options] = {
        "scale": ("mean1", "sum1"),
        "log": ("10", "e"),
        "M": ("channels", "units"),
        "last": ("logits", "skip", "prob"),
        "bias": ("scaled", "unscaled"),
    }
    stage: ClassVar[Stage] = Stage.SCALE
    broadcasts: ClassVar[bool] = True
    claims: ClassVar[frozenset[str]] = frozenset({"neurons' learning rates"})
    passes: ClassVar[frozenset[str]] = frozenset({"own", "public"})  # public only for what is observed

    mu0: float = 1.0
    a1: float = 0.45  # section 7.3, the main experiments
    a2: float = 0.3
    mu: str = ""  # mu_l of single layers in place of eq. 17: "conv1=2 fc1=1.75"
    scale: str = "mean1"  # section 7.3
    log: str = "10"  # section 7.3
    M: str = "channels"
    last: str = "logits"  # figure 4
    bias: str = "scaled"
    since: int = 1  # rounds

    def check(self, setting: Setting) -> None:
        for key, value in (("mu0", self.mu0), ("a1", self.a1), ("a2", self.a2)):
            if not (math.isfinite(value) and value >= 0):
                raise RecipeError(f"fednlr: {key} = {value} must be a finite number of at least 0")
        if self.since < 1:
            raise RecipeError(f"fednlr: since = {self.since} must be a round, 1 or later")
        names = [name for name, _ in self._given()]
        if len(set(names)) < len(names):
            raise RecipeError(f"fednlr: mu = {self.mu!r} names a layer twice")

    def _given(self) -> list[tuple[str, float]]:
        """The pairs of `mu`. RecipeError for what is none."""
        pairs = []
        for word in self.mu.split():
            name, _, number = word.partition("=")
            try:
                value = float(number)
            except ValueError:
                value = math.nan
            if not (name and math.isfinite(value) and value >= 1):
                raise RecipeError(
                    f"fednlr: mu = {self.mu!r} has {word!r}; must be layer=number with blanks between the pairs only, "
                    "such as 'conv1=2 fc1=1.75', each number finite and at least 1"
                )
            pairs.append((name, value))
        return pairs

    def ratio(self, l: int, n_layers: int, units: int) -> float:  # noqa: E741, the paper's letter
        """Eq. 17: mu_l = mu_0 + a1 l / L + a2 log M_l, with l = 1..L."""
        return self.mu0 + self.a1 * l / n_layers + self.a2 * (math.log10 if self.log == "10" else math.log)(units)

    def layers(self, task: Task, view: View, data: Data) -> list[tuple[Layer, Tensor, float]]:
        """Lines 5-6: the layers that are scaled, each with hbar_l [M_l] (eq. 14) and mu_l (eq. 17)."""
        assert data.own is not None
        every = task.network.layers
        head = every[-1].name

        def sums(batch: Batch) -> Tree:
            found = task.activations(view.start, view.buffers, batch.x)
            if self.last == "prob":
                found = found | {head: torch.softmax(found[head], dim=1)}
            return {name: _sum(h, batch.mask) for name, h in found.items()}

        mean = data.own.mean(sums)  # [M_l], or [M_l, H, W] of a convolution
        scaled = [
            (l, layer)
            for l, layer in enumerate(every, start=1)  # noqa: E741, the paper's letter
            if any(key in view.start for key in layer.parameters) and (self.last != "skip" or layer.name != head)
        ]
        given, names = dict(self._given()), [layer.name for _, layer in scaled]
        if unknown := [name for name in given if name not in names]:
            raise UserError(
                f"fednlr: mu = {self.mu!r} names {', '.join(map(repr, unknown))}{nearest(unknown[0], names)}, which "
                f"{task.network.name!r} has no scaled layer for; allowed: {', '.join(names) or 'none'}"
            )
        found = []
        for l, layer in scaled:  # noqa: E741, the paper's letter
            h = mean[layer.name]
            mu = self.ratio(l, len(every), h.numel() if self.M == "units" else layer.units)
            found.append((layer, h.flatten(1).mean(1) if h.ndim > 1 else h, given.get(layer.name, mu)))
        return found

    def prepare(self, task: Task, view: View, data: Data) -> Tree:
        """Lines 5-8: the factor of every neuron, by parameter."""
        factors: Tree = {}
        for layer, h, mu in self.layers(task, view, data):
            keys = [key for key in layer.parameters if key in view.start]
            if self.bias == "unscaled":
                keys = [key for key in keys if view.start[key].ndim > 1]
            factors.update(dict.fromkeys(keys, self._now(self.factors(h, mu, self.scale), view)))
        return factors

    def _now(self, factor: Tensor, view: View) -> Tensor:
        """The factors [M_l] of this round: all 1 before `since`."""
        return factor if self.since == 1 else torch.where(view.shared["scaled"] > 0, factor, torch.ones_like(factor))

    def init_server(self, params: Params, desk: Desk) -> Tree:
        return {} if self.since == 1 else {"round": next(iter(params.values())).new_ones(())}

    def broadcast(self, state: Tree) -> Tree:
        return {} if self.since == 1 else {"scaled": (state["round"] >= self.since).to(state["round"].dtype)}

    def step(self, direction: Params, state: Tree, update: Update) -> tuple[Params, Tree]:
        return direction, {} if self.since == 1 else {"round": state["round"] + 1}

    @staticmethod
    def factors(h: Tensor, mu: float, scale: str = "mean1") -> Tensor:
        """Eqs. 15-16: M q with q = softmax(h / T), T = (max h - min h) / ln mu; [M] -> [M], mean 1, max / min = mu.

        With "sum1" it is q, unless all keep the rate.
        """
        spread = h.max() - h.min()
        if mu <= 1:
            return torch.ones_like(h)
        flat = spread <= 0
        # From the smallest, so that activations that hardly differ are not lost beside their size.
        share = (h - h.min()) / torch.where(flat, torch.ones_like(spread), spread)  # 0 to 1
        q = torch.softmax(share * math.log(mu), dim=0)
        return torch.where(flat, torch.ones_like(h), q * (h.shape[0] if scale == "mean1" else 1))

    def correct(self, tree: Params, params: Params, view: View) -> Params:
        """Eq. 18: the rate of row m is eta times its factor."""
        factors = view.prepared
        return {
            key: update * leading(factors[key], update) if key in factors else update for key, update in tree.items()
        }

    def observe(self, task: Task, trace: Trace, view: View, data: Data) -> Tree:
        """By scaled layer T_l (figure 3; NaN if mu_l <= 1), mu_l, the factors and their range. Where there is a public
        split, which has all classes, also table 4: the mean activations [C, M_l] of the last hidden layer on its
        samples of each class before and after training, the neurons bound to each class [C, M_l] before training, and
        the drift [C] of their activation.
        """
        seen: Tree = {"T": {}, "mu": {}, "factor": {}, "smallest": {}, "largest": {}}
        for layer, h, mu in self.layers(task, view, data):
            factor, spread = self._now(self.factors(h, mu, self.scale), view), h.max() - h.min()
            values = (spread / math.log(mu) if mu > 1 else spread * math.nan, torch.full_like(spread, mu))
            for key, value in zip(seen, (*values, factor, factor.min(), factor.max()), strict=True):
                seen[key][layer.name] = value
        if len(task.network.layers) > 1 and data.public is not None:
            labels, n_classes = torch.cat([batch.y for batch in data.public]), task.network.n_classes
            before = _last_hidden(task, view.start, view.buffers, data.public)
            after = _last_hidden(task, trace.end, trace.buffers, data.public)
            seen["before"], seen["after"] = (class_means(h, labels, n_classes) for h in (before, after))
            seen["bound"], seen["drift"] = bound(before, labels, n_classes), drift(before, after, labels, n_classes)
        return seen


def _last_hidden(task: Task, params: Params, buffers: Params, public: Plan) -> Tensor:
    """The activation of each neuron of the last hidden layer on each sample, a channel's mean over space, [n, M_l]."""
    layer = task.network.layers[-2].name
    found = [task.activations(params, buffers, batch.x)[layer] for batch in public]
    return torch.cat([h.flatten(2).mean(2) if h.ndim > 2 else h for h in found])


def _sum(h: Tensor, mask: Tensor | None) -> Tensor:
    """Over the samples of a batch, [B, ...] -> [...]."""
    return h.sum(0) if mask is None else torch.tensordot(mask.to(h.dtype), h, dims=1)
