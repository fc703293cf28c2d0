"""FedCM: client-level momentum.
Xu, Wang, Wang, Yao: FedCM: Federated Learning with Client-level Momentum, 2021.
https://arxiv.org/abs/2106.10874

Every local step goes along alpha g + (1 - alpha) Delta. Delta is the mean gradient of the last
round: the clients' mean way, per local step and per unit of eta_l.
- We found no code of the authors. The formulas agree with those of FL-Simulator
  (https://github.com/woodenchild95/FL-Simulator), which clips gradients at 10 beside them.
- Each client's way is divided by its own number of steps, so clients with many batches do not
  prolong Delta. FL-Simulator divides all by the number of the first client.
- The step is written as alpha (g + (1 - alpha) / alpha Delta). g includes weight decay and the
  terms that other methods add.
- Local training is plain SGD. What else lengthens a step comes back through Delta in every round
  and grows: with alpha = 0.1 and momentum 0.9 up to 9 times a round. So momentum is refused, and so
  is FedNLR, as it has rates above 1 / (1 - alpha): its run on digits ended with one class.

Meeting others: Delta comes from the local training, not from a refinement, with the weights of the
average (CCN's, too). With FedBN a client's batch norms take plain steps: the server knows no
gradient of them. Its FedML pair is `make_pair("fedcm")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import (
    Change,
    Client,
    Component,
    Exclusive,
    Needs,
    Replies,
    Server,
    Setting,
    Weights,
)
from fedml_noniid.core.options import Positive, RecipeError, Share
from fedml_noniid.core.sums import weighted_sum
from fedml_noniid.core.trees import Params, Tree, add, scale, zeros_like


@dataclass(frozen=True)
class FedCM(Component):
    """Mixes the mean gradient of the last round into every local step."""

    name: ClassVar[str] = "fedcm"
    needs: ClassVar[Needs] = Needs(steps=True, replies=Replies.SCALARS)  # it weighs by steps

    alpha: Share = 0.1  # FL-Simulator's default; at 1 it is FedAvg
    weights: Weights = "uniform"
    server_lr: Positive = 1.0  # eta_g, in units of the clients' mean way

    @property
    def exclusive(self) -> frozenset[Exclusive]:
        return frozenset(
            {Exclusive.DRIFT, Exclusive.OPTIMIZER, Exclusive.NEURON_RATES}
            | ({Exclusive.SERVER_STEP} if self.server_lr != 1 else set())
        )

    def check(self, setting: Setting) -> None:
        if setting.optimizer != "sgd" or setting.momentum:
            raise RecipeError(
                f"fedcm: optimizer = {setting.optimizer!r} with momentum = {setting.momentum} does "
                "not step along a gradient, which Delta is a mean of; allowed: sgd without momentum"
            )

    def init_server(self, server: Server) -> Tree:
        return {"Delta": zeros_like(server.params)}

    def broadcast(self, server: Server) -> Tree:
        """Delta_t, beside x_t."""
        return {"Delta": server.state["Delta"]}

    def gradient_term(self, w: Params, client: Client) -> Params:
        """(1 - alpha) / alpha Delta_t; with `update_factor`, v = alpha g + (1 - alpha) Delta_t."""
        return scale((1 - self.alpha) / self.alpha, client.shared["Delta"])

    def update_factor(self, client: Client) -> Params:
        """alpha, for every row."""
        return {
            name: leaf.new_full(leaf.shape[:1], self.alpha) for name, leaf in client.params.items()
        }

    def step(self, server: Server) -> Change:
        """Delta_{t+1} = mean over S of (x_t - x_k) / (K_k eta_l); x_{t+1} = x_t + eta_g mean over S
        of (x_k - x_t)."""
        per_step = -server.weights / (server.replies.steps.clamp(min=1) * server.task.lr)  # [M]
        state = {"Delta": weighted_sum(per_step, server.trained)}
        if self.server_lr == 1:
            return Change(state)
        return Change(state, add(server.params, scale(self.server_lr, server.update)))
