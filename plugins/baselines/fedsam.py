"""FedSAM: sharpness-aware minimisation on the clients.
Qu, Li, Duan, Liu, Tang, Lu: Generalized Federated Learning via Sharpness Aware Minimization, ICML
2022. https://arxiv.org/abs/2206.02618

Each local step takes its gradient where the loss of its batch is highest at a distance of rho, to
first order. So every step costs two gradients of the same batch.
- We found no code of the authors. The formula agrees with `ESAM` of the code of FedLESAM's authors
  (https://github.com/MediaBrain-SJTU/FedLESAM), down to the 1e-7; they clip gradients beside it.
- The length is that of all parameters as one vector. The mean over the cohort is uniform, as in
  that code. eta_g is 1.
- Both gradients see the same dropout. Batch norms' statistics, and the recorded local loss, are
  those of the second pass.

Meeting others: the first gradient is that of the loss with the terms of other methods in it (MOON),
without what they add to the gradient. Those terms (FedProx, SCAFFOLD) are taken at w, and weight
decay too. `fedcm+fedsam` is the paper's MoFedSAM. FedBN's batch norms are not moved. Its FedML pair
is `make_pair("fedsam")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import Client, Component, Exclusive, Needs, Weights
from fedml_noniid.core.options import NonNegative
from fedml_noniid.core.trees import Params, Tree, add, norm, scale

EPS = 1e-7  # of a length that is divided by


@dataclass(frozen=True)
class FedSAM(Component):
    """Takes each gradient where the local loss is higher, and so seeks flat minima."""

    name: ClassVar[str] = "fedsam"
    needs: ClassVar[Needs] = Needs(gradient=True)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.GRADIENT_POINT})

    rho: NonNegative = 0.1  # FedLESAM's authors
    weights: Weights = "uniform"

    def gradient_point(self, w: Params, g: Params, client: Client) -> Params | None:
        """w + rho g / ||g||."""
        return add(w, to_length(self.rho, g)) if self.rho else None


def to_length(rho: float, tree: Tree) -> Tree:
    """rho tree / ||tree||; 0 where the tree is 0."""
    return scale(rho / (norm(tree) + EPS), tree)
