"""Centralised training.
Robbins, Monro: A Stochastic Approximation Method, Annals of Mathematical Statistics 1951.
https://doi.org/10.1214/aoms/1177729586

No federation: one model is trained on the data of all clients. This control shows what the split
over clients costs.

A round has the same number of epochs as in other recipes, over the union of the clients' data, with
the same batch size. The optimiser is reset between rounds. A round takes as many steps as all
clients together, one after the other. Validation and public data stay out. It composes with
nothing. FedML pair: none can be deployed, because in federated learning the data may not leave
their silo.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import Component, Needs


@dataclass(frozen=True)
class Centralised(Component):
    """Trains on the union of all data."""

    name: ClassVar[str] = "centralised"
    needs: ClassVar[Needs] = Needs(pooled=True)
