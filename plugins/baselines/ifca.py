"""IFCA, the Iterative Federated Clustering Algorithm.
Ghosh, Chung, Yin, Ramchandran: An Efficient Framework for Clustered Federated Learning, NeurIPS
2020. https://arxiv.org/abs/2006.04088. Algorithm 1, option II (model averaging).

The server has K models. In each round they go to the cohort. A client takes the one with the lowest
loss on its samples, trains it, and sends the update with its choice. Each model becomes the mean
of what its clients made of it.
- theta_0 starts as w_0. The others start as w_0 with the numbers of each tensor shuffled: other
  draws from the same distribution. A network that begins with trained weights has them in theta_0
  only.
- Means go by the number of samples, as FedAvg's; the paper's clients have equally many.
- A client is tested with the model that it chose when it last took part, and with theta_0 before it
  did. A new client takes the model with the lowest loss.
- Each round has one more exchange: K models down, and the choice, K numbers, up.

Meeting others: they see a client's own model as the received one, so FedProx pulls to it. Methods
that send more than the model, such as SCAFFOLD's c, are refused: it would be one for all clusters.
So is what changes the server's one model, which no client receives: it takes the mean of all
updates, and is FedAvg's, to the bit, with `clusters: 1`. Its FedML pair is `make_pair("ifca")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedml_noniid.core.component import (
    MODEL_OF,
    MODELS,
    Answer,
    Ask,
    Asks,
    Change,
    Client,
    Component,
    Exchanges,
    Exclusive,
    Needs,
    Replies,
    Server,
    Setting,
)
from fedml_noniid.core.data import Batch
from fedml_noniid.core.options import Count, Range
from fedml_noniid.core.randomness import fold, permutation
from fedml_noniid.core.sums import weighted_mean
from fedml_noniid.core.trees import Tree, add, leaves, row, tree_map


@dataclass(frozen=True)
class IFCA(Component):
    """Trains K models; each client takes the one with the lowest loss on its samples."""

    name: ClassVar[str] = "ifca"
    needs: ClassVar[Needs] = Needs(local_set=True, replies=Replies.SCALARS)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.RECEIVED, Exclusive.OWN_MODEL})
    ranges: ClassVar[Mapping[str, Range]] = {"s": Range(0, 1, whole=True)}

    clusters: Count = 2  # K

    def exchanges(self, setting: Setting) -> Exchanges:
        return Exchanges(round=1)

    def init_server(self, server: Server) -> Tree:
        """theta_j: w_0, with shuffled numbers for j > 0."""

        def started(j: int) -> Tree:
            keys = {name: fold(fold(server.key, j), name) for name in server.params}
            order = {name: permutation(keys[name], w.numel()) for name, w in server.params.items()}
            params = {
                name: w.flatten()[order[name]].reshape(w.shape) if j else w
                for name, w in server.params.items()
            }
            return {"params": params, "buffers": server.buffers}

        zero = torch.zeros(server.n_clients, dtype=torch.int64, device=server.keys.device)
        return {MODELS: stacked([started(j) for j in range(self.clusters)]), MODEL_OF: zero}

    def assign(self, server: Server) -> Asks:
        """Sends all K models to the cohort."""
        first, others = (row(server.state[MODELS], part) for part in (0, slice(1, None)))
        reply = yield Ask("choose", server.cohort, first["params"], first["buffers"], others)
        chosen = reply.upload["s"].argmax(1)  # [M]
        clients = torch.tensor(reply.clients, device=chosen.device)
        return Change({MODEL_OF: server.state[MODEL_OF].index_copy(0, clients, chosen)})

    def answer(self, client: Client) -> Answer:
        """s_k: 1 for the j with the lowest F_k(theta_j), else 0."""
        # A tree without leaves does not arrive at a silo.
        others = [row({"buffers": {}, **client.shared}, j) for j in range(self.clusters - 1)]
        models = [(client.params, client.buffers), *((w["params"], w["buffers"]) for w in others)]

        def losses(batch: Batch) -> Tree:
            outputs = [client.task.eval(*model, batch.x).logits for model in models]
            return {"F": torch.stack([client.task.loss.values(z, batch.y) for z in outputs], 1)}

        j = client.local_set.mean(losses)["F"].argmin()
        return Answer({"s": (torch.arange(self.clusters, device=j.device) == j).float()})

    def step(self, server: Server) -> Change:
        """theta_j = sum_k s_kj n_k w_k / sum_k s_kj n_k; a model without clients stays."""
        model_of = server.state[MODEL_OF]
        return Change(
            {MODELS: averaged(server, server.state[MODELS], model_of)}, metrics=who(model_of)
        )


def stacked(models: list[Tree]) -> Tree:
    """Models as one tree, leaves [K, ...]."""
    return tree_map(lambda *leaves: torch.stack(leaves), *models)


def averaged(server: Server, models: Tree, model_of: Tensor) -> Tree:
    """Each model plus the mean update of its clients, and the mean of their running statistics.

    `models` [K, ...]; `model_of` [N], the number of each client's.
    """
    replies, new = server.replies, []
    number = model_of[torch.tensor(replies.clients, device=model_of.device)]  # [M]
    count = torch.arange(len(next(leaves(models))), device=number.device)
    omegas = server.omega * (number == count.unsqueeze(1))  # [K, M]
    for j, used in enumerate(omegas.any(1).tolist()):
        model = row(models, j)
        if used:
            update = weighted_mean(omegas[j], replies.deltas)
            buffers = weighted_mean(omegas[j], replies.buffers)
            model = {"params": add(model["params"], update), "buffers": buffers}
        new.append(model)
    return stacked(new)


def who(model_of: Tensor) -> Tree:
    """Who has which model, [N], and how many models are in use."""
    # Counted on the device, for which the host would wait.
    ordered = model_of.sort().values
    return {MODEL_OF: model_of, "clusters": 1.0 + (ordered.diff() != 0).sum()}
