"""SGDM: SGD with momentum.
Liu, Chen, Chen, Zhang: Accelerating Federated Learning via Momentum Gradient Descent, IEEE TPDS
31(8), 2020. https://arxiv.org/abs/1910.03197

CCN compares "SGDM" and cites this paper and one without momentum, so there are three methods:
- `sgdm`, Liu et al.'s MFL: v = gamma v + g, w = w - eta v on the clients. The server averages w and
  v with the same weights and sends both; clients start from that v. The paper has full batches, and
  every client takes part in every round. Here clients take mini-batches, and v is the average over
  the last cohort.
- `sgdm_local`: the clients' v starts at 0 in every round, but for methods that keep the optimiser's
  memory (`rfedavg_authors`).
- `sgdm_server`: heavy ball on the server, d = gamma d + u, w = w + d, with the average update u.
  MOON's code multiplies u by 1 - gamma and FL-bench takes Nesterov's step; both are other methods.
gamma = 0.9 is our choice; CCN gives none. In the first two methods it is the momentum of local
training, and momentum must not differ from it. `sgdm_server` leaves local training alone.

Meeting others: g includes the terms that other methods add. CCN's weights apply to w and v.
FNR-FL's refinement runs with gamma too, from v = 0, and leaves the averaged v alone. In
`sgdm_server`, u is the aggregated update. Its clients may be refined or re-weighted, and another
method may replace the average. FedML pairs: `make_pair("sgdm")`, `make_pair("sgdm_local")`,
`make_pair("sgdm_server")`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from fedml_noniid.core.component import (
    Answer,
    Change,
    Client,
    Component,
    Exclusive,
    Server,
    Setting,
    Trace,
)
from fedml_noniid.core.optimizers import SGD, Optimizer
from fedml_noniid.core.options import Momentum, RecipeError
from fedml_noniid.core.sums import weighted_mean
from fedml_noniid.core.trees import Tree, add, tree_map, zeros_like


@dataclass(frozen=True)
class SGDMLocal(Component):
    """Gives local SGD a momentum."""

    name: ClassVar[str] = "sgdm_local"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.OPTIMIZER})

    gamma: Momentum = 0.9

    def check(self, setting: Setting) -> None:
        if setting.optimizer != "sgd":
            raise RecipeError(
                f"{self.name}: is SGD with momentum, got optimizer = "
                f"{setting.optimizer!r}; allowed: sgd, or the "
                "recipe sgdm_server"
            )

    def optimizer(self, configured: Optimizer) -> Optimizer:
        """v = gamma v + g, w = w - eta v."""
        assert isinstance(configured, SGD), "`check` refuses others"
        if configured.momentum not in (0, self.gamma):
            raise RecipeError(
                f"{self.name}: momentum = {configured.momentum} and {self.name}.gamma = "
                f"{self.gamma} are the same "
                "number of one optimiser; leave momentum at null"
            )
        return replace(configured, momentum=self.gamma)


@dataclass(frozen=True)
class SGDM(SGDMLocal):
    """Averages the clients' momenta together with their models."""

    name: ClassVar[str] = "sgdm"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset(
        {Exclusive.OPTIMIZER, Exclusive.OPTIMIZER_MEMORY}
    )

    def init_server(self, server: Server) -> Tree:
        """{v = 0}, or nothing if gamma = 0."""
        return server.task.optimizer.init(server.params)

    def broadcast(self, server: Server) -> Tree:
        """v, the server's."""
        return server.state

    def warm_start(self, client: Client) -> Tree:
        """v_k = v, the server's."""
        return client.shared

    def report(self, trace: Trace, client: Client) -> Answer:
        """v_k after the last step."""
        return Answer(trace.optimizer)

    def step(self, server: Server) -> Change:
        """v = sum_k p_k v_k."""
        return Change(weighted_mean(server.omega, server.replies.upload))


@dataclass(frozen=True)
class SGDMServer(Component):
    """Gives the server a momentum."""

    name: ClassVar[str] = "sgdm_server"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.SERVER_STEP})

    gamma: Momentum = 0.9

    def init_server(self, server: Server) -> Tree:
        """d = 0."""
        return {"d": zeros_like(server.params)}

    def step(self, server: Server) -> Change:
        """d = gamma d + u, w = w + d."""
        d = tree_map(lambda d, u: self.gamma * d + u, server.state["d"], server.update)
        return Change({"d": d}, add(server.params, d))
