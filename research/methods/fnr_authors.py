"""FNR-FL as its authors' code has it, and a reading of J that has a gradient.
The paper's method is in `fedml_noniid.plugins.fnr`: Hu, Qiu, Tang: Feature Norm Regularized
Federated Learning, 2023. https://arxiv.org/abs/2312.06951

The authors' code, "the repo" below: https://github.com/LonelyMoonDesert/FNR-FL

The defaults are the repo's readings, but for two. Options:
- `public_data="test"`: D_public is the test set, as in the repo. This is a leak, there to reproduce
  the paper. The test set is then the public split of every other method in the recipe too.
  `data.public` may be 0: then the clients hold all training images, as in the repo. "train_holdout"
  is the public split.
- `fnr_reg`: J. "published" is the paper's. "off" leaves J out and gives the same weights.
  "squared_live" is our reading of section 5.2's words: J = sum_c rho_c (mean_m F_m[c] - f_c)^2.
  f_c, the mean norm of class c in the batch, has a gradient. Without others m there is no term. It
  needs a lambda of its own.
- `refine_optimizer="adam"`: phase 2 takes Adam (the repo's default) with the local rate and weight
  decay. "same": the optimiser of local training, section 6.1.

Two more readings are the paper's, and plans name them: `delta="rest"` and `fnr_mode="eval"`. The
repo's are not here: there the others are all m != j, and F_i is computed in training mode, a pass
that changes the running statistics.

FedML pair: `make_pair("fnr_authors:FNRAuthors")`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedml_noniid.core.component import Answer, Client, Needs, Public, Replies
from fedml_noniid.core.data import Batch, one_hot
from fedml_noniid.core.optimizers import Adam
from fedml_noniid.core.task import Output
from fedml_noniid.core.trees import Tree
from fedml_noniid.plugins.fnr.algorithm import FNR


@dataclass(frozen=True)
class FNRAuthors(FNR):
    """FNR-FL with the options of its authors' code."""

    name: ClassVar[str] = "fnr_authors"

    public_data: Literal["test", "train_holdout"] = "test"
    fnr_reg: Literal["published", "squared_live", "off"] = "published"
    delta: Literal["rest"] = "rest"
    fnr_mode: Literal["eval"] = "eval"
    refine_optimizer: Literal["adam", "same"] = "adam"

    @property
    def needs(self) -> Needs:
        public = Public.TEST_SET if self.public_data == "test" else Public.LABELLED
        return Needs(
            public=public, features=True, whole_models=True, classes=True, replies=Replies.MODELS
        )

    def each(self, delta: Tensor, total: Tensor, count: int) -> Tree:
        """What J compares with: Delta, the mean over the others, or nothing."""
        if self.fnr_reg == "published":
            return super().each(delta, total, count)
        return {"mean": total / count} if self.fnr_reg == "squared_live" and count else {}

    def answer(self, client: Client) -> Answer:
        """With the optimiser of phase 2."""
        if self.refine_optimizer == "adam":
            adam = Adam(client.task.lr, weight_decay=client.task.optimizer.weight_decay)
            client = replace(client, task=replace(client.task, optimizer=adam))
        return super().answer(client)

    def regulariser(self, out: Output, batch: Batch, client: Client) -> Tensor:
        """rho_c is the fraction of class c in the batch, so sum_c rho_c v[c] is the mean of v[y]
        over it."""
        if self.fnr_reg == "published":
            return super().regulariser(out, batch, client)
        if not client.each:  # "off", or nobody to compare with
            return out.logits.new_zeros(())
        # At h = 0 the norm has no derivative; torch takes 0.
        norms = torch.linalg.vector_norm(out.features, dim=1)  # [B]
        is_class = one_hot(batch.y, client.task.network.n_classes, norms.dtype)  # [B, C]
        rho = is_class.mean(0)
        f = (norms[:, None] * is_class).mean(0) / rho.clamp(min=1e-12)
        j: Tensor = (rho * (client.each["mean"] - f).square()).sum()
        return j
