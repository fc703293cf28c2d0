"""FedDyn.
Acar, Zhao, Matas, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic
Regularization, ICLR 2021. https://arxiv.org/abs/2111.04263

Algorithm 1. The local loss is f_k(w) - <g_k, w> + (alpha/2) ||w - w_t||^2. The added terms enter by
their gradient; the reported loss is f_k. Clients are averaged uniformly. h moves by 1/N, where N
counts all clients. g_k and h start at 0, so h is always the mean of all g_k.
- The evaluated model is the sent one. The authors also report the means of the clients' models.
- Any local optimiser is allowed: g_k and h are computed from models, without a step size.
- The options of the authors' code are in `feddyn_authors.py`.

Meeting others: any other method that corrects the gradient is refused. With FNR-FL, g_k and h come
from the local training and the mean from the refined models. With CCN, the mean over S has CCN's
weights and h stays uniform. At the fixed point all w_k are equal, so all weights give the same
mean. FedML pair: `make_pair("feddyn")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

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
from fedml_noniid.core.options import Positive
from fedml_noniid.core.sums import added
from fedml_noniid.core.trees import Params, Tree, add, tree_map, zeros_like


@dataclass(frozen=True)
class FedDyn(Component):
    """Changes every local loss so that its minimum is also a minimum of the mean loss."""

    name: ClassVar[str] = "feddyn"
    weights: ClassVar[Weights] = "uniform"

    alpha: Positive = 0.1  # FedNLR, section 7.1; the server divides by it

    @property
    def exclusive(self) -> frozenset[Exclusive]:
        return frozenset(
            {Exclusive.DRIFT, Exclusive.PROXIMAL, Exclusive.SERVER_STEP, Exclusive.AVERAGE}
        )

    def init_client(self, client: Client) -> Tree:
        """g_k = 0."""
        return {"g": zeros_like(client.params)}

    def init_server(self, server: Server) -> Tree:
        return {"h": zeros_like(server.params)}

    def alpha_k(self, client: Client, leaf: Tensor) -> float | Tensor:
        """alpha as a factor of a leaf of the client's tree; the same for all clients."""
        return self.alpha

    def gradient_term(self, w: Params, client: Client) -> Params:
        """Eq. 1: -g_k + alpha (w - w_t)."""
        return tree_map(
            lambda g_k, w, w_t: self.alpha_k(client, w) * (w - w_t) - g_k,
            client.memory["g"],
            w,
            client.params,
        )

    def report(self, trace: Trace, client: Client) -> Answer:
        """g_k <- g_k - alpha (w_k - w_t)."""

        def renewed(g_k: Tensor, w_k: Tensor, w_t: Tensor) -> Tensor:
            return g_k - self.alpha_k(client, w_k) * (w_k - w_t)

        return Answer(
            memory={"g": tree_map(renewed, client.memory["g"], trace.params, client.params)}
        )

    def step(self, server: Server) -> Change:
        """h <- h - (alpha / N) sum over S of (w_k - w_t); w = mean over S of w_k - h / alpha."""
        fraction = self.alpha / server.n_clients
        h = tree_map(
            lambda h, delta: h - fraction * added(delta), server.state["h"], server.trained
        )
        return Change(
            {"h": h},
            add(server.params, tree_map(lambda u, h: u - h / self.alpha, server.update, h)),
        )
