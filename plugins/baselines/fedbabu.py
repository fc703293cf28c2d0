"""FedBABU. Oh, Kim, Yun: FedBABU: Toward Enhanced Representation for Federated Image Classification, ICLR 2022.
https://arxiv.org/abs/2106.06042

Algorithm 1. The head, here the last layer with its bias, keeps the random values of w_0: clients train, send and
average the body only. The head is never sent, because every client draws it from the same seed.
- Weights are n_k / sum n, as CCN compares it; the authors' code averages with 1/m: `weights="uniform"`.
- Left out is the personal fine-tuning after the last round: it makes one model per client, and what the papers compare
  is the global model. It is evaluated with the random head that the body was trained for.

Meeting others: they see the body only, so norms, momenta, control variates and refinements leave the head alone. What
reads the classifier (FedRS's bias) finds it in the task. Its FedML pair is `make_pair("fedbabu")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plugins.core.component import Claim, Component, Needs, Weights


@dataclass(frozen=True)
class FedBABU(Component):
    """Trains the body under a classifier that keeps its random initial values."""

    name: ClassVar[str] = "fedbabu"
    needs: ClassVar[Needs] = Needs(fixed_classifier=True)
    claims: ClassVar[frozenset[Claim]] = frozenset({Claim.CLASSIFIER})

    weights: Weights = "size"  # CCN's n_r / n; the authors' code: uniform
