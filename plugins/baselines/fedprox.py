"""FedProx.
Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys
2020. https://arxiv.org/abs/1812.06127

Algorithm 2 with a fixed number of local epochs. The proximal term (mu/2)||w - w_t||^2 enters as its
gradient, which is exact and costs no autograd. The reported local loss is the cross-entropy without
it. Its FedML pair is `make_pair("fedprox")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import Client, Component, Exclusive
from fedml_noniid.core.options import NonNegative
from fedml_noniid.core.trees import Params, tree_map


@dataclass(frozen=True)
class FedProx(Component):
    """Pulls the local model towards the received one."""

    name: ClassVar[str] = "fedprox"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.PROXIMAL})

    # FedNLR, section 7.1; rFedAvg uses 1.0, FedNNNN table 5 has 0.005 to 0.02
    mu: NonNegative = 0.01

    def gradient_term(self, w: Params, client: Client) -> Params:
        """Eq. 2: mu (w - w_t)."""
        return tree_map(lambda w, w_t: self.mu * (w - w_t), w, client.params)
