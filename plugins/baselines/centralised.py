"""Centralised training. Robbins, Monro: A Stochastic Approximation Method, Annals of Mathematical Statistics 1951.
https://doi.org/10.1214/aoms/1177729586

No federation: one model trained on the data of all clients. The control that shows what the split over clients costs.

A round is as many epochs over the union of the clients' data, with the same batch size and the optimiser reset between
rounds, so it takes as many steps as all clients together, one after the other. Validation data stay out, public data
too unless `with_public`. It composes with nothing. It has no FedML pair that could be deployed: federated learning is
for data that may not leave their silo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plugins.core.component import Component, RecipeError, Setting


@dataclass(frozen=True)
class Centralised(Component):
    """Trains on the union of all data."""

    name: ClassVar[str] = "centralised"
    pools: ClassVar[bool] = True

    with_public: bool = False  # whether the public split is part of the union, as it is for FNR-FL's clients

    @property
    def simulation_only(self) -> str:
        return "centralised trains one model on the data of all, which may not leave their silos"

    def check(self, setting: Setting) -> None:
        if self.with_public and setting.n_public == 0:
            raise RecipeError("centralised: with_public = True, but there is no public split; set data.public")

    def shared(self, n_public: int) -> int:
        """All of it, for the one that trains."""
        return n_public if self.with_public else 0
