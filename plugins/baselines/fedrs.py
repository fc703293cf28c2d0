"""FedRS: restricted softmax. Li, Zhan: FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID
Data, KDD 2021. https://doi.org/10.1145/3447548.3467254

In the local loss, the scores of classes that the client has no sample of are scaled by alpha.
- `form="hard"` is the paper: s_c = 1 for a class with samples, alpha without.
- `form="soft"` is that of the authors' code (https://github.com/lxcnju/FedRepo): s_c = alpha + (1 - alpha) n_c / max n.
  There each step applies it again to what the step before left, so that s_c goes to 1 within a round; here none does.
- The paper's classifier has no bias. Ours is not scaled: o_c = s_c w_c h + b_c.
- Which classes a client has is read from its whole local set; evaluation uses the plain logits.

Meeting others: a refinement (FNR-FL) trains with the plain logits; under FedBABU it is the gradient of the body that
shrinks. Its FedML pair is `make_pair("fedrs")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from plugins.core.component import Component, Data, Options, RecipeError, Setting, View
from plugins.core.task import Task
from plugins.core.trees import Params, Tree, leaves


@dataclass(frozen=True)
class FedRS(Component):
    """Holds back the updates of the classifier's rows for classes that a client does not have."""

    name: ClassVar[str] = "fedrs"
    options: ClassVar[Options] = {"form": ("hard", "soft")}
    claims: ClassVar[frozenset[str]] = frozenset({"logits of the local loss"})
    passes: ClassVar[frozenset[str]] = frozenset({"own"})

    n_classes: int  # C
    form: str = "hard"
    alpha: float = 0.5  # FedNLR, section 7.1, "according to the original paper"

    def check(self, setting: Setting) -> None:
        if not 0 <= self.alpha <= 1:
            raise RecipeError(f"fedrs: alpha = {self.alpha} must lie in [0, 1]")

    def prepare(self, task: Task, view: View, data: Data) -> Tree:
        """s_c of every class, [C]."""
        assert data.own is not None
        n = data.own.class_counts(self.n_classes)  # [C]
        share = n / n.max() if self.form == "soft" else (n > 0).to(n.dtype)
        s = 1 - (1 - self.alpha) * (1 - share)  # exactly 1 where share is
        return {"s": s.to(next(leaves(view.start)).dtype)}

    def adjust_logits(self, logits: Tensor, task: Task, params: Params, view: View) -> Tensor:
        """s_c w_c h + b_c, as o_c + (s_c - 1)(o_c - b_c), which leaves o_c as it is where s_c = 1."""
        bias = next(name for name in task.network.layers[-1].parameters if name.endswith(".bias"))
        scores = logits - task.whole(params)[bias]  # w_c h, [B, C]
        s: Tensor = view.prepared["s"]
        return logits + (s - 1) * scores
