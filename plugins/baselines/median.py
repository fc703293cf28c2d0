"""Coordinate-wise median and trimmed mean.
Yin, Chen, Ramchandran, Bartlett: Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates, ICML 2018. https://arxiv.org/abs/1803.01498

Algorithm 1, options I and II, where updates of several local steps stand in place of gradients.
- The median of an even number is the mean of the middle two.
- The trimmed mean leaves out floor(beta M) of the largest and of the smallest numbers. The paper
  leaves fractions open. A beta that trims nobody of the cohort is refused.
- Clients that miss a round make M smaller, so that fewer are trimmed.

FedML pairs: `make_pair("median")`, `make_pair("trimmed_mean")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedml_noniid.core.component import Server
from fedml_noniid.core.options import Range, RecipeError
from fedml_noniid.core.sums import weighted_mean
from fedml_noniid.core.trees import Params, tree_map
from fedml_noniid.plugins.baselines.robust import RobustRule


@dataclass(frozen=True)
class Median(RobustRule):
    """Takes the median of the clients, coordinate by coordinate."""

    name: ClassVar[str] = "median"

    def _rule(self, x: Params, server: Server) -> Params:
        """med{x_k}, definition 1."""
        m = len(server.omega)
        rows = tree_map(lambda leaf: leaf.sort(dim=0).values, x)
        return tree_map(lambda leaf: (leaf[(m - 1) // 2] + leaf[m // 2]) / 2, rows)


@dataclass(frozen=True)
class TrimmedMean(RobustRule):
    """Averages each coordinate without its largest and smallest numbers."""

    name: ClassVar[str] = "trimmed_mean"

    beta: Annotated[float, Range(0, 0.5, open="()")] = 0.2  # ours: at least the attackers' fraction

    def _fits(self, m: int) -> None:
        if not self._trimmed(m):
            raise RecipeError(
                f"'trimmed_mean': beta = {self.beta} of {m} clients or buckets trims nobody",
                allowed="beta x clients (or buckets) per round of at least 1",
            )

    def _trimmed(self, m: int) -> int:
        return int(self.beta * m + 1e-9)  # 0.29 * 100 is below 29

    def _rule(self, x: Params, server: Server) -> Params:
        """trmean_beta{x_k}, definition 2."""
        m = len(server.omega)
        b = self._trimmed(m)
        rows = tree_map(lambda leaf: leaf.sort(dim=0).values[b : m - b], x)
        return weighted_mean(None, rows)
