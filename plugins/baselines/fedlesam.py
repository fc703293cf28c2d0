"""FedLESAM: sharpness-aware minimisation by the way of the global model.
Fan, Hu, Yao, Niu, Zhang, Sugiyama, Wang: Locally Estimated Global Perturbations are Better than
Local Perturbations for Federated Sharpness-aware Minimization, ICML 2024.
https://arxiv.org/abs/2405.18890. The authors' code: https://github.com/MediaBrain-SJTU/FedLESAM

FedSAM's perturbation for the price of one gradient: it points from the received model to the one
that the client received when it last took part, the way that the global model came.
- w_old is the client's memory, as in the paper. The authors' code has the model of the last round
  for every client. With full participation the two are the same.
- Before a client's first participation w_old is w_0. If the received model is w_0 too, nothing is
  perturbed.
- The length is that of all parameters as one vector. The code divides by the sum of the lengths of
  single tensors, which is more: its perturbations are shorter than rho.
- rho = 0.1 is the code's default. Its authors tune rho.

Meeting others: as FedSAM. `fedlesam+scaffold` and `feddyn+fedlesam` are the authors' FedLESAM-S and
FedLESAM-D. FedBN's batch norms are not moved. Its FedML pair is `make_pair("fedlesam")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import Answer, Client, Component, Exclusive, Trace, Weights
from fedml_noniid.core.options import NonNegative
from fedml_noniid.core.trees import Params, Tree, add, sub
from fedml_noniid.plugins.baselines.fedsam import to_length


@dataclass(frozen=True)
class FedLESAM(Component):
    """Takes each gradient where the global model came from, and so seeks flat minima of it."""

    name: ClassVar[str] = "fedlesam"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.GRADIENT_POINT})

    rho: NonNegative = 0.1
    weights: Weights = "uniform"

    def init_client(self, client: Client) -> Tree:
        """w_old = w_0."""
        return {"w_old": client.params}

    def prepare(self, client: Client) -> Tree:
        """delta_k = rho (w_old - w_t) / ||w_old - w_t||."""
        return {"delta": to_length(self.rho, sub(client.memory["w_old"], client.params))}

    def gradient_point(self, w: Params, g: Params, client: Client) -> Params | None:
        """w + delta_k."""
        return add(w, client.prepared["delta"]) if self.rho else None

    def report(self, trace: Trace, client: Client) -> Answer:
        """w_old <- w_t."""
        return Answer(memory={"w_old": client.params})
