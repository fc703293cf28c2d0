"""FedAvgM: FedAvg with momentum on the server.
Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019. https://arxiv.org/abs/1909.06335

The name that most suites use for `sgdm_server`: both have the same bits. The method is the heavy
ball v = beta v + u, w = w + v on the aggregated update u, as in the code of FedExP's and of
FedNTD's authors. A step by Nesterov, as in FL-bench, is another method.

Meeting others: as `sgdm_server`. Its FedML pair is `make_pair("fedavgm")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.plugins.core.component import Change, Component, Exclusive, Server
from fedml_noniid.plugins.core.options import Momentum
from fedml_noniid.plugins.core.trees import Tree, add, tree_map, zeros_like


@dataclass(frozen=True)
class FedAvgM(Component):
    """Gives the server a momentum."""

    name: ClassVar[str] = "fedavgm"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.SERVER_STEP})

    beta: Momentum = 0.9  # FedExP's authors; FedNTD's have 0.7

    def init_server(self, server: Server) -> Tree:
        """v = 0."""
        return {"v": zeros_like(server.params)}

    def step(self, server: Server) -> Change:
        """v = beta v + u, w = w + v."""
        v = tree_map(lambda v, u: self.beta * v + u, server.state["v"], server.update)
        return Change({"v": v}, add(server.params, v))
