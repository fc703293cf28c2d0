"""FedAsync.
Xie, Koyejo, Gupta: Asynchronous Federated Optimization, 2019. https://arxiv.org/abs/1903.03934

Algorithm 1 takes one answer to a step, of a client that trained from v_k = w^{t - tau_k}:

    w^{t+1} = (1 - alpha_t) w^t + alpha_t w_k,   alpha_t = alpha s(tau_k)

- s is the paper's polynomial (1 + tau)^(-a), or its constant with `exponent` 0; not its hinge.
- Unlike FedBuff it takes w_k - w^t and not w_k - v_k: an old answer pulls back to its old model.
- With K answers to a step it is w^t + alpha (1/K) sum_k s(tau_k) (w_k - w^t), our choice.
- The paper's proximal term is FedProx's: `fedasync+fedprox`.
- Running statistics are the mean over the answers, weighted by s; those of one are taken as they
  are.

Schedules and refusals are those of FedBuff. It has no FedML pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedml_noniid.core.component import MODEL_OF, MODELS, Server
from fedml_noniid.core.options import Positive
from fedml_noniid.core.sums import weighted_mean
from fedml_noniid.core.trees import Params, row, tree_map
from fedml_noniid.plugins.baselines.fedbuff import FedBuff


@dataclass(frozen=True)
class FedAsync(FedBuff):
    """Mixes each client's model into the server's, the less the older its start is."""

    name: ClassVar[str] = "fedasync"

    server_lr: Positive = 0.6  # alpha

    def average(self, server: Server) -> Params:
        """alpha (1/K) sum_k s(tau_k) (w_k - w^t), where w_k - w^t = Delta_k + (v_k - w^t)."""
        clients = server.state[MODEL_OF][list(server.replies.clients)]
        old = row(server.state[MODELS]["params"], clients)
        behind = tree_map(lambda v, w: v - w, old, server.start)
        moved = weighted_mean(server.omega, server.replies.deltas)
        back = weighted_mean(server.omega, behind)
        return self.shortened(server, tree_map(torch.add, moved, back))
