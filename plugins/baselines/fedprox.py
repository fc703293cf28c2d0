"""FedProx. Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020.
https://arxiv.org/abs/1812.06127

Algorithm 2 with a fixed number of local epochs. The proximal term (mu/2)||w - w_t||^2 enters as its gradient, which is
exact and costs no autograd; the reported local loss is the cross-entropy without it. Its FedML pair is
`make_pair("fedprox")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plugins.core.component import Component, RecipeError, Setting, View
from plugins.core.trees import Params, tree_map


@dataclass(frozen=True)
class FedProx(Component):
    """Pulls the local model towards the received one."""

    name: ClassVar[str] = "fedprox"
    broadcasts: ClassVar[bool] = True
    claims: ClassVar[frozenset[str]] = frozenset({"proximal term"})

    mu: float = 0.01  # FedNLR, section 7.1; rFedAvg uses 1.0, FedNNNN table 5 has 0.005 to 0.02

    def check(self, setting: Setting) -> None:
        if self.mu < 0:
            raise RecipeError(f"fedprox: mu = {self.mu} must be at least 0")

    def correct(self, tree: Params, params: Params, view: View) -> Params:
        """Gradient of eq. 2: g + mu (w - w_t)."""
        return tree_map(lambda g, w, w_t: g + self.mu * (w - w_t), tree, params, view.start)
