"""FedRS: restricted softmax.
Li, Zhan: FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data, KDD
2021. https://doi.org/10.1145/3447548.3467254

In the local loss, the scores of classes without samples on the client are scaled by alpha.
- `form="hard"` is the paper: s_c = 1 for a class with samples, alpha without.
- `form="soft"` is the authors' code (https://github.com/lxcnju/FedRepo): s_c = alpha + (1 - alpha)
  n_c / max n. There each step applies it again to the result of the last step, so s_c goes to 1
  within a round. Here s_c stays fixed.
- The paper's classifier has no bias. Our bias is not scaled: o_c = s_c w_c h + b_c.
- A client's classes are those of its whole local set. Evaluation uses the plain logits.

Meeting others: a refinement (FNR-FL) trains with the plain logits. Under FedBABU the gradient of
the body shrinks instead. Its FedML pair is `make_pair("fedrs")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedml_noniid.core.component import Client, Component, Exclusive, Needs
from fedml_noniid.core.options import Fraction
from fedml_noniid.core.trees import Params, Tree


@dataclass(frozen=True)
class FedRS(Component):
    """Reduces the updates of the classifier's rows for classes that a client does not have."""

    name: ClassVar[str] = "fedrs"
    needs: ClassVar[Needs] = Needs(local_set=True, features=True, classifier=True, classes=True)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.LOGITS})

    form: Literal["hard", "soft"] = "hard"
    alpha: Fraction = 0.5  # FedNLR, section 7.1, "according to the original paper"

    def prepare(self, client: Client) -> Tree:
        """1 - s_c of every class, [C]."""
        n = client.local_set.class_counts(client.task.network.n_classes)  # [C]
        has = n / n.max() if self.form == "soft" else (n > 0).to(n.dtype)
        return {"less": (1 - self.alpha) * (1 - has)}  # exactly 0 where `has` is 1

    def logits(self, logits: Tensor, w: Params, client: Client) -> Tensor:
        """s_c w_c h + b_c, as o_c - (1 - s_c)(o_c - b_c), which leaves o_c as it is where s_c =
        1."""
        b = next(
            name for name in client.task.network.layers[-1].parameters if name.endswith(".bias")
        )
        less: Tensor = client.prepared["less"].to(logits.dtype)
        return logits - less * (logits - client.task.whole(w)[b])
