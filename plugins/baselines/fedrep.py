"""FedRep.
Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations for Personalized Federated
Learning, ICML 2021. https://arxiv.org/abs/2102.07078. The authors' code:
https://github.com/lgcollins/FedRep, which we could not read; the order of the steps is also that of
PFLlib's `clientrep.py` (https://github.com/TsingZ0/PFLlib).

The body, which makes the representation, is averaged; the head, here the classifier,
stays with the client. A client trains the head alone first, with the received body, and then the
body alone, with its new head.
- The first `head_epochs` passes over the local data train the head, all others the body. The last
  step is the body's in any case: with many `head_epochs` that is the paper's
  algorithm: tau steps of the head and one of the body.
- Both have the same step size. Momentum of the part that rests stays as it is. Adam's count of
  steps goes on for both.
- A client with one step in a round trains its body only.
- The weights are n_k / sum n, as in FedAvg. A client that never took part has the head of w_0.

Meeting others: as FedPer, from which it differs in the order of training only. Other methods see
the body. Those that divide its way by the steps are refused, as not all of them move it. Its
FedML pair is `make_pair("fedrep")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedml_noniid.core.component import HEAD, Component, Needs
from fedml_noniid.core.options import Count


@dataclass(frozen=True)
class FedRep(Component):
    """Trains each client's own head first, then the body that all share."""

    name: ClassVar[str] = "fedrep"

    head_epochs: Count = 1

    @property
    def needs(self) -> Needs:
        return Needs(personal=frozenset({HEAD}), personal_first=self.head_epochs)
