"""FedDecorr.
Shi, Liang, Zhang, Tan, Bai: Towards Understanding and Mitigating Dimensional Collapse in
Heterogeneous Federated Learning, ICLR 2023. https://arxiv.org/abs/2210.00226. The authors' code:
https://github.com/bytedance/FedDecorr

loss = CE + beta L. L is small where the dimensions of the representation z, the input of the
classifier, are uncorrelated over the batch. K is their correlation matrix, from z with mean 0 and
deviation 1 in every dimension.
- As in the authors' code (`FedDecorrLoss`), for a batch of B samples, L = mean over i != j of ((B -
  1) K_ij)^2 / B, with 1e-8 beside the variances. beta = 0.1 belongs to it. The paper prints
  ||K||_F^2 / d^2, which is smaller by a factor of about B.
- A batch of one sample has no correlations: L = 0, as in the code.

Meeting others: z comes from the network; with MOON's projection head it is the head's output. Its
FedML pair is `make_pair("feddecorr")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedml_noniid.core.component import Client, Component, Exclusive, Needs
from fedml_noniid.core.data import Batch
from fedml_noniid.core.options import NonNegative
from fedml_noniid.core.task import Output
from fedml_noniid.core.trees import Params, leading

EPS = 1e-8  # of the authors' code: a dimension that is the same for all samples stays 0


@dataclass(frozen=True)
class FedDecorr(Component):
    """Decorrelates the dimensions of the representation."""

    name: ClassVar[str] = "feddecorr"
    needs: ClassVar[Needs] = Needs(features=True)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.SAMPLE_GRADIENTS})

    beta: NonNegative = 0.1  # the authors' scripts for CIFAR-10 and TinyImageNet

    def penalty(self, w: Params, out: Output, batch: Batch, client: Client) -> Tensor | None:
        """beta L, with (B - 1) K = sum over the batch of x x', x = (z - mean z) / sqrt(var z)."""
        if not self.beta:
            return None
        z = out.features  # [B, d]
        d, n = z.shape[1], batch.sum(torch.ones_like(z[:, 0])).clamp(min=1)
        centred = z - batch.mean(z)
        variance = batch.sum(centred.square()) / (n - 1).clamp(min=1)  # [d]
        x = centred / (variance + EPS).sqrt()
        rows = x if batch.mask is None else leading(batch.mask.to(x.dtype), x) * x
        products = rows.T @ rows * (1 - torch.eye(d, dtype=z.dtype, device=z.device))  # [d, d]
        return self.beta * products.square().sum() / max(d * (d - 1), 1) / n
