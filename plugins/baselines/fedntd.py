"""FedNTD: not-true distillation.
Lee, Jeong, Shin, Bae, Yun: Preservation of the Global Knowledge by Not-True Distillation in
Federated Learning, NeurIPS 2022. https://arxiv.org/abs/2106.03097. The authors' code:
https://github.com/Lee-Gihun/FedNTD

loss = CE + beta L_NTD. L_NTD keeps the local model's opinion on the wrong classes near that of the
received model: the KL divergence of their softmax over all classes but the true one.
- The factor tau^2 and the mean over the batch are those of the authors' code (`NTD_Loss`). At the
  default tau = 1 the factor changes nothing.
- beta = tau = 1 are the values of the authors' `config/fedntd.json`.
- The received model runs in eval mode and has no gradient. The authors' networks have no batch norm
  or dropout, so the mode makes no difference there.
- With two classes there is one wrong class, so L_NTD is 0 and has no gradient: FedNTD is FedAvg.

Meeting others: both models' logits are the plain ones, before FedRS or FedLC change them.
FedML pair: `make_pair("fedntd")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedml_noniid.core.component import Client, Component, Needs
from fedml_noniid.core.data import Batch
from fedml_noniid.core.options import NonNegative, Positive
from fedml_noniid.core.task import Output
from fedml_noniid.core.trees import Params
from fedml_noniid.plugins.baselines.fedlc import masked


@dataclass(frozen=True)
class FedNTD(Component):
    """Distils what the received model says about the classes that a sample does not have."""

    name: ClassVar[str] = "fedntd"
    needs: ClassVar[Needs] = Needs(classes=True)

    beta: NonNegative = 1.0
    tau: Positive = 1.0

    def penalty(self, w: Params, out: Output, batch: Batch, client: Client) -> Tensor | None:
        """beta L_NTD = beta tau^2 sum_{c != y} q_g(c) log(q_g(c) / q_l(c)), with q(c) = e^(z_c/tau)
        / sum_{c' != y} e^(z_c'/tau)."""
        if not self.beta:
            return None
        z_g = client.task.eval(client.params, client.buffers, batch.x).logits.detach()  # [B, C]
        not_true = torch.arange(z_g.shape[1], device=z_g.device) != batch.y.unsqueeze(1)  # [B, C]
        log_g, log_l = (
            torch.log_softmax(masked(not_true, z / self.tau), dim=1) for z in (z_g, out.logits)
        )
        divergence = (log_g.exp() * (log_g - log_l)).sum(1)  # [B]
        return self.beta * self.tau**2 * batch.mean(divergence)
