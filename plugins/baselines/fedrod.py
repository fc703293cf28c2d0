"""Fed-RoD: federated robust decoupling.
Chen, Chao: On Bridging Generic and Personalized Federated Learning for Image Classification, ICLR
2022. https://arxiv.org/abs/2107.00778. We found no code of the authors (their repository,
https://github.com/hongyouc/Fed-RoD, has a README only); where the text leaves a choice we follow
PFLlib (https://github.com/TsingZ0/PFLlib, `clientrod.py`).

Two classifiers on the same features. The generic one trains with the layers below it on the
balanced softmax: o_c + log n_c, with n_c the client's samples of class c. Both are averaged as in
FedAvg. The personal classifier of a client trains on the plain cross-entropy of the sum of both
logits, on features and generic logits without a gradient. The client is tested with the sum.
- This is the linear form of the personal head; the paper's other form, a hypernetwork, is left out.
- The sum of two linear layers is one: the tested model has the classifier W_g + W_p.
- The personal head begins at 0, so a client begins with the generic prediction. PFLlib begins with
  a copy of the generic head.
- A class that a client lacks is left out of its softmax, which is the limit n_c = 0.
- The personal pass reads the batch norms' statistics of its batch, as the generic pass does. The
  client keeps none: it is tested with those that it receives.

Meeting others: they act on the generic model. Other losses on the logits are refused (FedRS,
FedLC), and a classifier that nobody trains (FedBABU). Its FedML pair is `make_pair("fedrod")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedml_noniid.core.component import Client, Component, Exclusive, Needs, OwnModel, V
from fedml_noniid.core.trees import Params, Tree, zeros_like
from fedml_noniid.plugins.baselines.fedlc import masked


@dataclass(frozen=True)
class FedRoD(Component):
    """Trains a generic classifier with the balanced softmax and a personal one beside it."""

    name: ClassVar[str] = "fedrod"
    needs: ClassVar[Needs] = Needs(local_set=True, features=True, classifier=True, classes=True)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset(
        {Exclusive.OWN_MODEL, Exclusive.LOGITS, Exclusive.CLASSIFIER}
    )

    def init_client(self, client: Client) -> Tree:
        """W_p = 0, the client's own classifier."""
        head = client.task.network.layers[-1].parameters
        return {V: zeros_like({name: client.params[name] for name in head})}

    def prepare(self, client: Client) -> Tree:
        """log n_c, and which classes the client has; both [C]."""
        n = client.local_set.class_counts(client.task.network.n_classes)
        return {"log_n": n.clamp(min=1).log(), "present": n > 0}

    def logits(self, logits: Tensor, w: Params, client: Client) -> Tensor:
        """Balanced softmax: o_c + log n_c."""
        log_n = client.prepared["log_n"].to(logits.dtype)
        return masked(client.prepared["present"], logits + log_n)

    def own_model(self, v: Params, w: Params, client: Client) -> OwnModel:
        """The received body with the classifier W_g + W_p; w has no gradient here."""
        return OwnModel(w | {name: w[name] + leaf for name, leaf in v.items()})
