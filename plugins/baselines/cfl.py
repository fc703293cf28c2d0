"""CFL, Clustered Federated Learning.
Sattler, Mueller, Samek: Clustered Federated Learning: Model-Agnostic Distributed Multitask
Optimization under Privacy Constraints, IEEE TNNLS 2020. https://arxiv.org/abs/1910.01991. The
authors' code: https://github.com/felisat/clustered-federated-learning

All clients begin in one cluster with one model. When the mean update of a cluster is short and one
of its updates is long, its model is stationary for the cluster and not for that client. Then it is
split in two such that the largest cosine between updates of the two parts is the smallest possible,
and each part goes on with its own model.
- The paper has a third condition, on gamma, the deviation from a client's expected gradient, which
  no server knows. As in the authors' code, the norms decide, and the first rounds split nothing.
- The bipartition is the paper's, algorithm 1. The authors' code has complete linkage in its place.
- The number of clusters has a limit, because the server's state has a fixed shape.
- The paper's clients all take part. Here, a client that misses the round of a split stays in the
  part that keeps the cluster's number, which only another split can mend.
- A new client takes the model with the lowest loss; the paper compares its update with old ones.

Meeting others: as `ifca`, and what is refused there is refused here. FedAvg, to the bit, as long as
nothing is split. Its FedML pair is `make_pair("cfl")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedml_noniid.core.component import (
    MODEL_OF,
    MODELS,
    Change,
    Component,
    Exclusive,
    Needs,
    Replies,
    Server,
)
from fedml_noniid.core.options import Count, NonNegative
from fedml_noniid.core.trees import Tree, tree_map
from fedml_noniid.plugins.baselines.ifca import averaged, stacked, who


@dataclass(frozen=True)
class CFL(Component):
    """Splits a cluster of clients in two by the cosines of their updates, once its model stands."""

    name: ClassVar[str] = "cfl"
    needs: ClassVar[Needs] = Needs(replies=Replies.MODELS)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.RECEIVED, Exclusive.OWN_MODEL})

    eps1: NonNegative = 0.4  # a cluster whose mean update is shorter
    eps2: NonNegative = 1.6  # and whose longest update is longer is split
    first: Count = 20  # the first round that may split
    clusters: Count = 4  # at most

    def init_server(self, server: Server) -> Tree:
        model = {"params": server.params, "buffers": server.buffers}
        zero = torch.zeros(server.n_clients, dtype=torch.int64, device=server.keys.device)
        return {MODELS: stacked([model] * self.clusters), MODEL_OF: zero}

    def step(self, server: Server) -> Change:
        """Splits what has to be split; then each model is the mean of its clients' models."""
        models, clients = server.state[MODELS], server.replies.clients
        model_of = server.state[MODEL_OF].tolist()  # on the host, which decides who goes where
        delta = torch.cat([leaf.flatten(1) for leaf in server.replies.deltas.values()], 1).double()
        for j in range(max(model_of) + 1):
            new, mine = max(model_of) + 1, [i for i, k in enumerate(clients) if model_of[k] == j]
            if server.round < self.first or new >= self.clusters:
                break
            for i in self._second(delta[mine], server.omega[mine]):
                model_of[clients[mine[i]]] = new
            models = tree_map(lambda leaf, j=j, new=new: _copied(leaf, j, new), models)
        numbers = server.state[MODEL_OF].new_tensor(model_of)
        return Change(
            {MODELS: averaged(server, models, numbers), MODEL_OF: numbers}, metrics=who(numbers)
        )

    def _second(self, delta: Tensor, omega: Tensor) -> list[int]:
        """Which rows of `delta` [m, P] leave the cluster: none, unless
        ||sum_k n_k delta_k / sum n_k|| < eps1 and max_k ||delta_k|| > eps2."""
        length = delta.norm(dim=1)  # [m]
        mean = (omega / omega.sum()) @ delta
        if len(delta) < 2 or mean.norm() >= self.eps1 or length.max() <= self.eps2:
            return []
        unit = delta / length.clamp(min=1e-30).unsqueeze(1)
        leave: list[int] = bipartition(unit @ unit.T).nonzero().flatten().tolist()
        return leave


def bipartition(alpha: Tensor) -> Tensor:
    """Two parts whose largest similarity `alpha` [m, m] between them is the smallest (algorithm
    1): the most similar are joined until two are left, which is single linkage.

    Returns which rows are not with row 0, [m] bool.
    """
    from scipy.cluster.hierarchy import fcluster, linkage

    i, j = torch.triu_indices(len(alpha), len(alpha), 1, device=alpha.device)
    tree = linkage((1 - alpha[i, j]).clamp(min=0).cpu().numpy(), "single")
    part = fcluster(tree, 2, "maxclust")  # [m]
    return torch.from_numpy(part != part[0])


def _copied(leaf: Tensor, j: int, new: int) -> Tensor:
    """Models [K, ...], with number `new` the same as number `j`."""
    return leaf.index_copy(0, torch.tensor([new], device=leaf.device), leaf[j : j + 1])
