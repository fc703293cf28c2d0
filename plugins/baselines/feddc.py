"""FedDC.
Gao, Fu, Li, Chen, Xu, Xu: FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling
and Correction, CVPR 2022. https://arxiv.org/abs/2203.11751. The authors' code:
https://github.com/gaoliang13/FedDC

Algorithm 1. The local loss is f_k(w) + (alpha/2) ||w - (w_t - h_k)||^2 + <w, Delta - Delta_k>. The
added terms enter by their gradient; the reported loss is f_k. h_k is the client's drift. Delta_k
and Delta are SCAFFOLD's c_i and c of the whole gradient.
- As in the authors' code, w = mean over S of w_k + mean over all clients of h_k, both uniform. The
  server computes the mean of h_k from the received models, so h_k is not sent. The traffic is 4M: w
  and Delta down, w_k and Delta_k's change up.
- K is the number of steps that the client took. The authors' code takes the mean client's number
  for every client.
- Two details of the authors' code are left out: it divides alpha and Delta by n_k / mean n on the
  client, and clips gradients at 10. Both change nothing for equal clients and small gradients.
- Momentum is refused: Delta_k would overshoot and grow in every round, as SCAFFOLD's c_i.

Meeting others: with FNR-FL, h_k and Delta_k come from the local training and the mean from the
refined models. With CCN, the mean over S has CCN's weights and the rest stays uniform. FedML pair:
`make_pair("feddc")`.
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
    Needs,
    Server,
    Setting,
    Trace,
    Weights,
)
from fedml_noniid.core.options import NonNegative, RecipeError
from fedml_noniid.core.sums import added
from fedml_noniid.core.trees import Params, Tree, add, sub, tree_map, zeros_like


@dataclass(frozen=True)
class FedDC(Component):
    """Lets every client learn its own drift from the server's model, and takes it out of the
    average."""

    name: ClassVar[str] = "feddc"
    needs: ClassVar[Needs] = Needs(steps=True)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset(
        {
            Exclusive.DRIFT,
            Exclusive.OPTIMIZER,
            Exclusive.PROXIMAL,
            Exclusive.SERVER_STEP,
            Exclusive.AVERAGE,
        }
    )
    weights: ClassVar[Weights] = "uniform"

    alpha: NonNegative = 0.01  # the authors' script for CIFAR-10

    def check(self, setting: Setting) -> None:
        if setting.optimizer != "sgd" or setting.momentum:
            raise RecipeError(
                f"feddc: optimizer = {setting.optimizer!r} with momentum = {setting.momentum} has "
                "no fixed step size, which Delta_k divides by; allowed: sgd without momentum"
            )

    def init_client(self, client: Client) -> Tree:
        """h_k = 0, Delta_k = 0."""
        return {"h": zeros_like(client.params), "Delta": zeros_like(client.params)}

    def init_server(self, server: Server) -> Tree:
        return {"h": zeros_like(server.params), "Delta": zeros_like(server.params)}

    def broadcast(self, server: Server) -> Tree:
        """Delta."""
        return {"Delta": server.state["Delta"]}

    def prepare(self, client: Client) -> Tree:
        """The constant parts of a round: w_t - h_k and Delta - Delta_k."""
        memory = client.memory
        return {
            "w_h": sub(client.params, memory["h"]),
            "drift": sub(client.shared["Delta"], memory["Delta"]),
        }

    def gradient_term(self, w: Params, client: Client) -> Params:
        """alpha (w - (w_t - h_k)) + Delta - Delta_k."""
        prepared = client.prepared
        return tree_map(
            lambda w, w_h, drift: self.alpha * (w - w_h) + drift,
            w,
            prepared["w_h"],
            prepared["drift"],
        )

    def report(self, trace: Trace, client: Client) -> Answer:
        """h_k <- h_k + w_k - w_t; Delta_k <- Delta_k - Delta + (w_t - w_k) / (K eta)."""
        memory, k_eta = client.memory, trace.steps.clamp(min=1) * client.task.lr
        moved = sub(trace.params, client.params)
        new = tree_map(
            lambda d_k, d, moved: d_k - d - moved / k_eta,
            memory["Delta"],
            client.shared["Delta"],
            moved,
        )
        return Answer(
            {"dDelta": sub(new, memory["Delta"])}, {"h": add(memory["h"], moved), "Delta": new}
        )

    def step(self, server: Server) -> Change:
        """Delta <- Delta + (1/N) sum over S of Delta_k's change; w = mean over S of w_k + (1/N) sum
        over all of h_k."""

        def renewed(mean: Tensor, changes: Tensor) -> Tensor:
            return mean + added(changes) / server.n_clients

        delta = tree_map(renewed, server.state["Delta"], server.replies.upload["dDelta"])
        h = tree_map(renewed, server.state["h"], server.trained)
        return Change({"h": h, "Delta": delta}, add(server.params, add(server.update, h)))
