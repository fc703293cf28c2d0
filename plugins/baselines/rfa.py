"""RFA, the geometric median of the clients' updates.
Pillutla, Kakade, Harchaoui: Robust Aggregation for Federated Learning, IEEE Transactions on Signal
Processing 70, 2022. https://arxiv.org/abs/1912.13445

The smoothed Weiszfeld algorithm (algorithm 2) with weights alpha_k = n_k / n, from their mean.
- A dishonest client may lie about its n_k; `weights="uniform"` takes alpha_k = 1 / M.
- CCN's weights act as elsewhere: alpha_k are the clients' weights.

Its FedML pair is `make_pair("rfa")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import Exclusive, Server, Weights
from fedml_noniid.core.options import Count, Positive
from fedml_noniid.core.sums import weighted_mean
from fedml_noniid.core.trees import Params, row_norms
from fedml_noniid.plugins.baselines.robust import RobustRule, minus


@dataclass(frozen=True)
class RFA(RobustRule):
    """Takes a point with the smallest sum of distances to the clients' updates."""

    name: ClassVar[str] = "rfa"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.AVERAGE})

    R: Count = 3  # the paper's experiments: iterations
    nu: Positive = 1e-6  # likewise
    weights: Weights = "size"  # type: ignore[misc]  # an option here

    def _rule(self, x: Params, server: Server) -> Params:
        """z <- sum_k beta_k x_k / sum_k beta_k, beta_k = alpha_k / max(nu, ||z - x_k||)."""
        z = weighted_mean(server.omega, x)
        for _ in range(self.R):
            beta = server.omega / row_norms(minus(x, z)).double().clamp(min=self.nu)
            z = weighted_mean(beta, x)
        return z
