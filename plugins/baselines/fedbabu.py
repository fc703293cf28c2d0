"""FedBABU.
Oh, Kim, Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022.
https://arxiv.org/abs/2106.06042

Algorithm 1. The head, here the last layer with its bias, keeps the random values of w_0: clients
train, send and average the body only. The head is never sent, because every client draws it from
the same seed.
- The weights are n_k / sum n, as in CCN's comparison. `weights="uniform"`: 1/m, as in the authors'
  code.
- The personal fine-tuning after the last round is left out: it makes one model per client, and the
  papers compare the global model. The global model is evaluated with the random head that its body
  was trained for.

Meeting others: other methods see the body only, so norms, momenta, control variates and refinements
leave the head alone. A method that reads the classifier (FedRS's bias) finds it in the task.
FedML pair: `make_pair("fedbabu")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import Component, Exclusive, Needs, Weights


@dataclass(frozen=True)
class FedBABU(Component):
    """Trains the body under a classifier that keeps its random initial values."""

    name: ClassVar[str] = "fedbabu"
    needs: ClassVar[Needs] = Needs(features=True, fixed_classifier=True)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.CLASSIFIER})

    weights: Weights = "size"  # CCN's n_r / n; the authors' code: uniform
