"""FedNSAM: sharpness-aware minimisation by the server's Nesterov momentum.
Liu, Shang, Tian, Liu, Liu: FedNSAM: Consistency of Local and Global Flatness for Federated
Learning, 2026. https://arxiv.org/abs/2602.23827. The authors' code:
https://github.com/junkangLiu0/FedNSAM

Each local step takes its gradient where the server's momentum m leads, less rho of its direction:
m estimates the way down of the global loss, so -m is the way up of FedSAM, for one gradient.
- We had the abstract and the code, not the algorithm's box. The formulas are those of `new_NSAM.py`
  and `optimizer/Nesterov.py` of 2025-07 (commit d41b5e6), which do what the abstract says.
- `main_FedNSAM.py` of 2026-03 (4443541) does something else. Its clients start at x + gamma m and
  perturb along their own gradients. Its server's m is (1 + gamma) times the last mean update: the
  loop over momenta runs over the updates. That form is not here.
- The code has weight decay 0.001, and the 1e-7. In round 1 m is 0, and the round is FedAvg's. The
  mean over the cohort is uniform.

Meeting others: as FedLESAM, and the server's step is FedAvgM's with step size 1. With gamma = 0 it
keeps the last mean update as m. FedBN's batch norms are not moved. Its FedML pair is
`make_pair("fednsam")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import Change, Client, Component, Exclusive, Server, Weights
from fedml_noniid.core.options import Momentum, NonNegative
from fedml_noniid.core.trees import Params, Tree, add, scale, sub, tree_map, zeros_like
from fedml_noniid.plugins.baselines.fedsam import to_length


@dataclass(frozen=True)
class FedNSAM(Component):
    """Takes each gradient ahead along the server's momentum, and so seeks flat minima."""

    name: ClassVar[str] = "fednsam"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset(
        {Exclusive.GRADIENT_POINT, Exclusive.SERVER_STEP}
    )

    gamma: Momentum = 0.85
    rho: NonNegative = 0.05
    weights: Weights = "uniform"

    def init_server(self, server: Server) -> Tree:
        """m = 0."""
        return {"m": zeros_like(server.params)}

    def broadcast(self, server: Server) -> Tree:
        """m_t, beside x_t."""
        return {"m": server.state["m"]}

    def prepare(self, client: Client) -> Tree:
        """e = gamma m_t - rho m_t / ||m_t||."""
        m = client.shared["m"]
        return {"e": sub(scale(self.gamma, m), to_length(self.rho, m))}

    def gradient_point(self, w: Params, g: Params, client: Client) -> Params | None:
        """w + e."""
        return add(w, client.prepared["e"]) if self.gamma or self.rho else None

    def step(self, server: Server) -> Change:
        """m_{t+1} = gamma m_t + u, x_{t+1} = x_t + m_{t+1}."""
        m = tree_map(lambda m, u: self.gamma * m + u, server.state["m"], server.update)
        return Change({"m": m}, add(server.params, m))
