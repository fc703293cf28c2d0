"""EF21: clients send the change of their update since they last took part.
Richtarik, Sokolov, Fatkhullin: EF21: A New, Simpler, Theoretically Better, and Practically Faster
Error Feedback, NeurIPS 2021. https://arxiv.org/abs/2106.05203

The algorithm for several nodes with the operator top_k, where the update w_k - w_t of several local
steps stands in place of the gradient, and the server adds g to the model. g_k^0 = 0.
- All clients count alike, also those that are not drawn: g is the mean of g_k over all N. A client
  that misses rounds keeps its g_k (as EF21-PP of the authors' later work).
- `share` is k / P; 0.05 is ours.

Meeting others: methods that weigh or average clients in another way are refused, as g would no
longer be the mean. For the rest see `compression`. Its FedML pair is `make_pair("ef21")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import (
    Answer,
    Change,
    Client,
    Component,
    Exclusive,
    Server,
    Trace,
    Weights,
)
from fedml_noniid.core.options import Share
from fedml_noniid.core.sums import weighted_sum
from fedml_noniid.core.trees import Params, Tree, add, scale, sub, zeros_like
from fedml_noniid.plugins.baselines.compression import Largest


@dataclass(frozen=True)
class EF21(Component):
    """Sends the largest numbers of the change of an update; the server adds the changes up."""

    name: ClassVar[str] = "ef21"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset(
        {Exclusive.UPDATE, Exclusive.AVERAGE, Exclusive.CLIENT_WEIGHTS, Exclusive.REFINEMENT}
    )
    weights: ClassVar[Weights] = "uniform"

    share: Share = 0.05

    @property
    def packing(self) -> Largest:
        return Largest(self.share)

    def init_client(self, client: Client) -> Tree:
        """g_k, and c_k as it was sent last."""
        return {"g": zeros_like(client.params), "c": zeros_like(client.params)}

    def report(self, trace: Trace, client: Client) -> Answer:
        """c_k = C(w_k - w_t - g_k); g_k <- g_k + c_k."""
        g = client.memory["g"]
        c = self.packing(sub(sub(trace.params, client.params), g))
        return Answer(memory={"g": add(g, c), "c": c})

    def leaving(self, delta: Params, client: Client) -> Params:
        """c_k."""
        return {**client.memory["c"]}

    def init_server(self, server: Server) -> Tree:
        return {"g": zeros_like(server.params)}

    def average(self, server: Server) -> Params:
        """g <- g + 1/N sum_k c_k."""
        total = weighted_sum(None, server.replies.deltas)
        return add(server.state["g"], scale(1 / server.n_clients, total))

    def step(self, server: Server) -> Change:
        return Change(state={"g": server.update})
