"""FedAvgM: FedAvg with momentum and a step size on the server.
Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019. https://arxiv.org/abs/1909.06335

The method is the heavy ball v = beta v + u, w = w + server_lr v on the aggregated update u, as in
the code of FedExP's and of FedNTD's authors, where the step size is 1: then it has the bits of
`sgdm_server`. With beta = 0 it is FedAvg with a step size on the server (FedOpt's SGD, Reddi et al.
2021, https://arxiv.org/abs/2003.00295), the control of every method that lengthens the server's
step. A step by Nesterov, as in FL-bench, is another method.

Meeting others: as `sgdm_server`. Its FedML pair is `make_pair("fedavgm")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import Change, Component, Exclusive, Server
from fedml_noniid.core.options import Momentum, Positive
from fedml_noniid.core.trees import Tree, add, scale, tree_map, zeros_like


@dataclass(frozen=True)
class FedAvgM(Component):
    """Gives the server a momentum and a step size."""

    name: ClassVar[str] = "fedavgm"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.SERVER_STEP})

    beta: Momentum = 0.9  # FedExP's authors; FedNTD's have 0.7
    server_lr: Positive = 1.0  # eta

    def init_server(self, server: Server) -> Tree:
        """v = 0."""
        return {"v": zeros_like(server.params)}

    def step(self, server: Server) -> Change:
        """v = beta v + u, w = w + eta v."""
        v = tree_map(lambda v, u: self.beta * v + u, server.state["v"], server.update)
        step = v if self.server_lr == 1 else scale(self.server_lr, v)  # 1: the bits of the sum
        return Change({"v": v}, add(server.params, step))
