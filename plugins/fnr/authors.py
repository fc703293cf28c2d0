"""FNR-FL as its authors' code has it, and readings of J that have a gradient.
The paper's method is in `algorithm.py`: Hu, Qiu, Tang: Feature Norm Regularized Federated Learning,
2023. https://arxiv.org/abs/2312.06951

The authors' code, "the repo" below: https://github.com/LonelyMoonDesert/FNR-FL

The defaults are the repo's readings. Options:
- `public_data="test"`: D_public is the test set, as in the repo. This is a leak, there to reproduce
  the paper. The test set is then the public split of every other method in the recipe too.
  `data.public` may be 0: then the clients hold all training images, as in the repo. "train_holdout"
  is the public split.
- `fnr_reg`: J. "published" is the paper's. "off" leaves J out and gives the same weights.
  "squared_live" is our reading of section 5.2's words: J = sum_c rho_c (mean_m F_m[c] - f_c)^2.
  f_c, the mean norm of class c in the batch, has a gradient. Without others m there is no term. It
  needs a lambda of its own. "signed_live": J = sum_c rho_c sum_m (F_m[c] - f_c), which has no lower
  bound and is for diagnosis only.
- `delta="all_others"`: the others are all m != j (the repo). "rest": those of Algorithm 2, S
  without S_re.
- `fnr_mode="train"`: F_i is computed with the statistics of the batches (the repo), `batch_size`
  samples each and in order. This pass changes the running statistics. A_i is measured with the new
  ones, phase 2 begins with them, and they are averaged, also if no client is refined. They are
  uploaded beside those of the training. A refined client repeats the pass instead of getting them
  back; dropout draws anew there. "eval": F_i has the running statistics of the training.
- `refine_optimizer="adam"`: phase 2 takes Adam (the repo's default) with the local rate and weight
  decay. "same": the optimiser of local training, section 6.1.

FedML pair: `make_pair("fnr_authors")`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedml_noniid.core.component import Answer, Asks, Client, Needs, Public, Replies, Server, Trace
from fedml_noniid.core.data import Batch, one_hot
from fedml_noniid.core.optimizers import Adam
from fedml_noniid.core.randomness import fold
from fedml_noniid.core.sums import added
from fedml_noniid.core.task import Output
from fedml_noniid.core.trees import Params, Tree
from fedml_noniid.plugins.fnr.algorithm import FNR, class_sums


@dataclass(frozen=True)
class FNRAuthors(FNR):
    """FNR-FL with the options of its authors' code."""

    name: ClassVar[str] = "fnr_authors"

    public_data: Literal["test", "train_holdout"] = "test"
    fnr_reg: Literal["published", "squared_live", "signed_live", "off"] = "published"
    delta: Literal["all_others", "rest"] = "all_others"
    fnr_mode: Literal["train", "eval"] = "train"
    refine_optimizer: Literal["adam", "same"] = "adam"

    @property
    def needs(self) -> Needs:
        public = Public.TEST_SET if self.public_data == "test" else Public.LABELLED
        return Needs(
            public=public, features=True, whole_models=True, classes=True, replies=Replies.MODELS
        )

    def report(self, trace: Trace, client: Client) -> Answer:
        """With "train", F_i is from the pass in training, A_i with the statistics after it, which
        go up too."""
        if self.fnr_mode == "eval":
            return super().report(trace, client)
        (norms, _, count), buffers = self.trained_pass(client, trace.params, trace.buffers)
        _, hits, _ = self.by_class(client, trace.params, buffers)
        return Answer(
            {"F": norms / count.clamp(min=1), "A": hits.sum() / count.sum(), "buffers": buffers}
        )

    def trained_pass(self, client: Client, w: Params, buffers: Params) -> tuple[Tensor, Params]:
        """As `by_class`, in training; and the running statistics after it."""
        public = client.public
        batches = replace(
            public, sizes=tuple(len(part) for part in torch.split(public.index, self.batch_size))
        )
        sums: list[Tensor] = []
        for s, batch in enumerate(batches):
            out = client.task.train(
                w, buffers, batch._replace(keys=fold(client.key, "features"), step=s)
            )
            buffers = out.buffers
            sums.append(class_sums(out, batch))
        return torch.stack(sums).sum(0), buffers

    def refine(self, server: Server) -> Asks:
        """With "train", the statistics that are averaged are those of the pass."""
        upload = dict(server.replies.upload)
        if self.fnr_mode == "train":
            replies = replace(server.replies, buffers=upload.pop("buffers"), upload=upload)
            server = replace(server, replies=replies)
        return (yield from super().refine(server))

    def others(self, norms: Tensor, worst: Tensor) -> tuple[Tensor, int]:
        """With "all_others", all m != j."""
        if self.delta == "rest":
            return super().others(norms, worst)
        return added(norms) - norms[worst], len(norms) - 1

    def each(self, delta: Tensor, total: Tensor, count: int) -> Tree:
        """What J compares with: the sum over the others and their number, their mean, or
        nothing."""
        if self.fnr_reg == "published":
            return super().each(delta, total, count)
        if self.fnr_reg == "signed_live":
            return {"sum": total, "others": total.new_full((len(total),), count)}
        return {"mean": total / count} if self.fnr_reg == "squared_live" and count else {}

    def answer(self, client: Client) -> Answer:
        """Starts from the statistics of the pass, with the optimiser of phase 2."""
        if self.fnr_mode == "train":
            client = replace(
                client, buffers=self.trained_pass(client, client.params, client.buffers)[1]
            )
        if self.refine_optimizer == "adam":
            adam = Adam(client.task.lr, weight_decay=client.task.optimizer.weight_decay)
            client = replace(client, task=replace(client.task, optimizer=adam))
        return super().answer(client)

    def regulariser(self, out: Output, batch: Batch, client: Client) -> Tensor:
        """rho_c is the fraction of class c in the batch, so sum_c rho_c v[c] is the mean of v[y]
        over it."""
        if self.fnr_reg == "published":
            return super().regulariser(out, batch, client)
        # At h = 0 the norm has no derivative; torch takes 0.
        each, norms = client.each, torch.linalg.vector_norm(out.features, dim=1)  # [B]
        j: Tensor = norms.new_zeros(())
        if self.fnr_reg == "signed_live":
            j = (each["sum"][batch.y] - each["others"] * norms).mean()
        elif each:
            is_class = one_hot(batch.y, client.task.network.n_classes, norms.dtype)  # [B, C]
            rho = is_class.mean(0)
            f = (norms[:, None] * is_class).mean(0) / rho.clamp(min=1e-12)
            j = (rho * (each["mean"] - f).square()).sum()
        return j
