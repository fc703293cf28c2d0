"""FedLC. Zhang, Li, Li, Xu, Wu, Ding, Wu: Federated Learning with Label Distribution Skew via Logits Calibration,
ICML 2022. https://arxiv.org/abs/2209.00189

In the local loss, z_c = o_c - tau n_c^(-1/4) for each class c, with n_c the client's samples of it.
- `form="all"`: cross-entropy of z over all classes. `form="excl"`: the denominator omits the true class. That is the
  paper's, says FL-bench, and collapses: the loss has no lower bound.
- `absent="masked"`: a class without samples leaves the softmax, which is the limit n_c -> 0, so neither loss nor
  gradient knows it. `absent="floor"`: its n_c counts as 1.
- "masked" with one class only: "all" gives loss 0 and no gradient, the limit again. "excl" has a sum over nothing,
  which the paper leaves open; it then does as "all".
- n_c is read from the whole local set; evaluation uses the plain logits.

Meeting others: a refinement (FNR-FL) trains with the plain logits. Its FedML pair is `make_pair("fedlc")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from plugins.core.component import Batch, Component, Data, Options, RecipeError, Setting, View
from plugins.core.task import Output, Task, masked_mean
from plugins.core.trees import Params, Tree, leaves


@dataclass(frozen=True)
class FedLC(Component):
    """Gives every class a margin in the local loss, the larger, the rarer the class is on the client."""

    name: ClassVar[str] = "fedlc"
    options: ClassVar[Options] = {"form": ("all", "excl"), "absent": ("masked", "floor")}
    claims: ClassVar[frozenset[str]] = frozenset({"logits of the local loss"})
    passes: ClassVar[frozenset[str]] = frozenset({"own"})

    n_classes: int  # C
    tau: float = 1.0  # FedNLR, section 7.1
    form: str = "all"
    absent: str = "masked"

    def check(self, setting: Setting) -> None:
        if not self.tau >= 0:
            raise RecipeError(f"fedlc: tau = {self.tau} must be at least 0")

    def prepare(self, task: Task, view: View, data: Data) -> Tree:
        """tau n_c^(-1/4), and which classes are in the softmax; both [C]."""
        assert data.own is not None
        n = data.own.class_counts(self.n_classes)
        margin = (self.tau * n.clamp(min=1) ** -0.25).to(next(leaves(view.start)).dtype)
        return {"margin": margin, "kept": n > 0 if self.absent == "masked" else n >= 0}

    def adjust_logits(self, logits: Tensor, task: Task, params: Params, view: View) -> Tensor:
        """z_c = o_c - tau n_c^(-1/4)."""
        return _only(view.prepared["kept"], logits - view.prepared["margin"])

    def penalty(self, task: Task, params: Params, out: Output, batch: Batch, view: View) -> Tensor | None:
        """With "excl", log sum_{c != y} e^{z_c} - log sum_c e^{z_c}: what its loss has beside the cross-entropy."""
        if self.form == "all":
            return None
        z = self.adjust_logits(out.logits, task, params, view)  # [B, C]
        others = _only(torch.arange(self.n_classes, device=z.device) != batch.y.unsqueeze(1), z)
        difference = torch.logsumexp(others, dim=1) - torch.logsumexp(z, dim=1)  # [B]
        several = view.prepared["kept"].sum() > 1
        return masked_mean(torch.where(several, difference, torch.zeros_like(difference)), batch.mask)


def _only(kept: Tensor, z: Tensor) -> Tensor:
    """`z` with a number in place of what is not kept that e^z takes to 0. Finite: a batch's padding may have any label,
    and its loss is multiplied by 0."""
    return torch.where(kept, z, torch.finfo(z.dtype).min / 2)
