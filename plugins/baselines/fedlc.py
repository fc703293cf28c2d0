"""FedLC.
Zhang, Li, Li, Xu, Wu, Ding, Wu: Federated Learning with Label Distribution Skew via Logits
Calibration, ICML 2022. https://arxiv.org/abs/2209.00189

In the local loss, z_c = o_c - tau n_c^(-1/4) for each class c. n_c is the client's number of
samples of that class.
- The loss is the cross-entropy of z over all classes. Without the true class in the denominator, as
  FL-bench reads the paper, it has no lower bound and training collapses.
- `absent="masked"`: a class without samples is left out of the softmax, which is the limit n_c ->
  0. It affects neither loss nor gradient. `absent="floor"`: its n_c counts as 1.
- "masked" with one class only gives loss 0 and no gradient, again the limit.
- n_c counts the whole local set. Evaluation uses the plain logits.

Meeting others: a refinement (FNR-FL) trains with the plain logits. Its FedML pair is
`make_pair("fedlc")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedml_noniid.core.component import Client, Component, Exclusive, Needs
from fedml_noniid.core.options import NonNegative
from fedml_noniid.core.trees import Params, Tree


@dataclass(frozen=True)
class FedLC(Component):
    """Gives every class a margin in the local loss; classes that are rare on the client get larger
    margins."""

    name: ClassVar[str] = "fedlc"
    needs: ClassVar[Needs] = Needs(local_set=True, classes=True)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.LOGITS})

    tau: NonNegative = 1.0  # FedNLR, section 7.1
    absent: Literal["masked", "floor"] = "masked"

    def prepare(self, client: Client) -> Tree:
        """tau n_c^(-1/4), and which classes are in the softmax; both [C]."""
        n = client.local_set.class_counts(client.task.network.n_classes)
        return {
            "margin": self.tau * n.clamp(min=1) ** -0.25,
            "counted": n > 0 if self.absent == "masked" else n >= 0,
        }

    def logits(self, logits: Tensor, w: Params, client: Client) -> Tensor:
        """z_c = o_c - tau n_c^(-1/4)."""
        return masked(
            client.prepared["counted"], logits - client.prepared["margin"].to(logits.dtype)
        )


def masked(counted: Tensor, z: Tensor) -> Tensor:
    """`z` where `counted`; elsewhere a number so low that e^z is 0.

    The number is finite: padding may have any label, and its loss is multiplied by 0.
    """
    return torch.where(counted, z, torch.finfo(z.dtype).min / 2)
