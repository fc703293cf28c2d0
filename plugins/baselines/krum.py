"""Krum and multi-Krum.
Blanchard, El Mhamdi, Guerraoui, Stainer: Machine Learning with Adversaries: Byzantine Tolerant
Gradient Descent, NIPS 2017. https://arxiv.org/abs/1703.02757

Updates of several local steps stand in place of gradients. `m` above 1 is multi-Krum.
- The score needs M - f - 2 neighbours, so f <= M - 3. The paper's proof asks for 2f + 2 < M.
- Where clients miss a round, M is smaller; at least one neighbour counts.
- Of equal scores, that of the client with the smaller number is taken.
- With bucketing, M counts buckets. `f` stays the number of dishonest clients: each may be in a
  bucket of its own.

Its FedML pair is `make_pair("krum")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedml_noniid.core.component import Server
from fedml_noniid.core.options import Count, CountOrNone, RecipeError
from fedml_noniid.core.sums import weighted_mean
from fedml_noniid.core.trees import Params, row, row_norms
from fedml_noniid.plugins.baselines.robust import RobustRule, minus


@dataclass(frozen=True)
class Krum(RobustRule):
    """Takes the update that lies nearest to its neighbours, or the mean of `m` such."""

    name: ClassVar[str] = "krum"

    f: CountOrNone = 1  # ours: how many clients of a round may be dishonest
    m: Count = 1  # the paper's Krum; above 1, multi-Krum

    def _fits(self, m: int) -> None:
        if m - self.f < max(3, self.m):
            raise RecipeError(
                f"'krum': f = {self.f}, m = {self.m} of {m} clients or buckets in a round is "
                "refused",
                allowed="f of at most the clients (or buckets) in a round - 3, and m of at most "
                "these - f",
            )

    def _rule(self, x: Params, server: Server) -> Params:
        """The rows with the lowest s(k) = sum of ||x_k - x_j||^2 over the M - f - 2 nearest j."""
        rows = len(server.omega)
        squares = torch.stack([row_norms(minus(x, row(x, k))) for k in range(rows)]).double() ** 2
        # The distance to itself is 0 and sorts first.
        scores = squares.sort(dim=1).values[:, 1 : 1 + max(rows - self.f - 2, 1)].sum(1)
        return weighted_mean(None, row(x, scores.argsort(stable=True)[: self.m]))
