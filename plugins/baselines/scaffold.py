"""SCAFFOLD.
Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: Stochastic Controlled Averaging for Federated
Learning, ICML 2020. https://arxiv.org/abs/1910.06378

Algorithm 1 with option II for c_i; `scaffold_i` has option I.
- Clients are averaged uniformly, as in the paper. `weights="size"`: the model is averaged by n_k,
  as in NIID-Bench, and the control variates stay uniform.
- With eta_g other than 1, SCAFFOLD owns the server step. It is then refused beside other methods
  that own that step.
- Option II takes a client's way by its steps for a gradient. Momentum makes the way longer, so c_i
  overshoots and grows in every round: with 0.9 a run on digits ended at chance. It is refused.
  FedNLR's rates above 2 do the same to their rows.

Meeting others: with FNR-FL, c_i is computed from the local training only, not from the refinement.
With CCN, the model step uses CCN's weights and the control variates stay uniform. FedML pair:
`make_pair("scaffold")`.
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
    Needs,
    Server,
    Setting,
    Trace,
    Weights,
)
from fedml_noniid.core.options import Positive, RecipeError
from fedml_noniid.core.sums import weighted_mean
from fedml_noniid.core.trees import Params, Tree, add, scale, sub, tree_map, zeros_like


@dataclass(frozen=True)
class Scaffold(Component):
    """Corrects each local step by the difference of the server's and the client's control
    variate."""

    name: ClassVar[str] = "scaffold"
    needs: ClassVar[Needs] = Needs(steps=True, unweighted=True)

    server_lr: Positive = 1.0  # eta_g, rFedAvg section VI-A
    weights: Weights = "uniform"

    @property
    def exclusive(self) -> frozenset[Exclusive]:
        return frozenset(
            {Exclusive.DRIFT, Exclusive.OPTIMIZER}
            | ({Exclusive.SERVER_STEP} if self.server_lr != 1 else set())
        )

    def check(self, setting: Setting) -> None:
        if setting.optimizer != "sgd" or setting.momentum:
            raise RecipeError(
                f"scaffold: optimizer = {setting.optimizer!r} with momentum = {setting.momentum} "
                "has no fixed step size, which option II of the control variate divides by; "
                "allowed: sgd without momentum, or the recipe scaffold_i"
            )

    def init_server(self, server: Server) -> Tree:
        return {"c": zeros_like(server.params)}

    def init_client(self, client: Client) -> Tree:
        """c_i = 0."""
        return {"c_i": zeros_like(client.params)}

    def broadcast(self, server: Server) -> Tree:
        """Line 4: c, beside x."""
        return {"c": server.state["c"]}

    def gradient_term(self, w: Params, client: Client) -> Params:
        """Line 10: y <- y - eta_l (g(y) - c_i + c)."""
        return sub(client.shared["c"], client.memory["c_i"])

    def report(self, trace: Trace, client: Client) -> Answer:
        """Lines 12-14: c_i+ <- c_i - c + (x - y_i) / (K eta_l); c_i+ - c_i goes up, c_i <- c_i+."""
        k_eta = trace.steps.clamp(min=1) * client.task.lr
        c_i, c = client.memory["c_i"], client.shared["c"]
        c_plus = tree_map(
            lambda c_i, c, x, y: c_i - c + (x - y) / k_eta, c_i, c, client.params, trace.params
        )
        return Answer({"dc": sub(c_plus, c_i)}, {"c_i": c_plus})

    def step(self, server: Server) -> Change:
        """Lines 16-17: x <- x + eta_g mean_S (y_i - x); c <- c + |S|/N mean_S (c_i+ - c_i)."""
        fraction = len(server.replies.clients) / server.n_clients
        c = add(
            server.state["c"], scale(fraction, weighted_mean(None, server.replies.upload["dc"]))
        )
        if self.server_lr == 1:
            return Change({"c": c})
        return Change({"c": c}, add(server.params, scale(self.server_lr, server.update)))
