"""FNR-FL. Hu, Qiu, Tang: Feature Norm Regularized Federated Learning: Transforming Skewed Distributions into Global
Insights, 2023. https://arxiv.org/abs/2312.06951 The authors' code, "the repo" below:
https://github.com/LonelyMoonDesert/FNR-FL

Algorithm 3 with algorithms 1 and 2. Departures and choices, and the options beside them:
- D_public, which the paper leaves undefined, is a class-balanced part of the training data that no client holds.
  `public_data="test"` is what the repo takes, the test set: a leak, there to reproduce the paper, and then the public
  split of every other method in the recipe too. It needs no `data.public`: at 0 the clients hold all training images,
  as in the repo.
- The loss is a mean over the batch, as everywhere here, not the sum that Algorithm 3 prints.
- J (lines 34-38) is kept as published. Delta_j is a number by then, so J has no gradient and lambda can't matter: what
  works is the fine-tuning on D_public, which has labels. `fnr_reg="off"` leaves J out and gives the same weights.
  "squared_live" is our reading of section 5.2's words: J = sum_c rho_c (mean_m F_m[c] - f_c)^2, where f_c, the mean
  norm of class c in the batch, has a gradient; no term where there are no others m. "signed_live":
  J = sum_c rho_c sum_m (F_m[c] - f_c), which has no lower bound and is for diagnosis only.
- The others m are those of Algorithm 2, S without S_re; `delta="all_others"`: all m != j (the repo).
- F_i is computed in eval mode; `fnr_mode="train"` (the repo): with the statistics of the batches, `batch_size` samples
  each and in order. The running statistics that this pass leaves are those that A_i is measured with, that phase 2
  begins with and that are averaged, also where nobody is refined. They are uploaded beside those of the training; a
  refined client makes the pass again instead of getting them back.
- Phase 2 takes the optimiser of local training with an empty memory; `refine_optimizer="adam"` (the repo's default):
  Adam with the same rate and weight decay.
- p and lambda are not stated in the paper; 0.5 and 1 are the defaults of the repo. "squared_live" needs a lambda of its
  own.
- Of equal A_i the lower id is refined first. S_re empty is FedAvg (in eval mode); with S_re = S, Delta_j is 0.
- A defence of a deployment may drop a refined model. That client then counts with its model of phase 1: the defence
  let it pass, and what other methods read of the client (below) belongs to phase 1.

Meeting others: "X+FNR" refines what X trained, and X's own terms are not part of the refinement; an optimiser that X
brings (SGDM) is. The average is of the refined models, and so is the direction of X's step. Reports and memories
(SCAFFOLD's c_i, FedNova's a_i, FedDyn's g_k and h by `Update.trained`) have phase 1 only. With a fixed head (FedBABU)
the refinement leaves it alone too. Buffers of batch norms follow the refinement.
FedML pair: `FNRTrainer`, `FNRAggregator`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from plugins.core.client import forward_of
from plugins.core.component import (
    Answer,
    Ask,
    Asks,
    Batch,
    Component,
    Data,
    Exchanges,
    Options,
    Plan,
    RecipeError,
    Reply,
    Server,
    Setting,
    Steps,
    Trace,
    Update,
    View,
    Work,
)
from plugins.core.noise import fold
from plugins.core.optimizers import Adam
from plugins.core.task import Output, Task, masked_mean, one_hot
from plugins.core.training import Hooks, local_steps
from plugins.core.trees import Params, Tree, tree_map

LOOK = -3  # which of the keys that belong to a client's is for its look at D_public; -1 and -2 are rFedAvg's


@dataclass(frozen=True)
class FNR(Component):
    """Refines, on public data, the models of the clients that are worst on it."""

    name: ClassVar[str] = "fnr"
    options: ClassVar[Options] = {
        "public_data": ("train_holdout", "test"),
        "fnr_reg": ("published", "squared_live", "signed_live", "off"),
        "delta": ("rest", "all_others"),
        "fnr_mode": ("eval", "train"),
        "refine_optimizer": ("same", "adam"),
    }
    claims: ClassVar[frozenset[str]] = frozenset({"refinement on public data"})
    passes: ClassVar[frozenset[str]] = frozenset({"public"})
    public: ClassVar[str] = "labelled"

    n_classes: int  # C
    p: float = 0.5  # share of the clients that are refined
    lam: float = 1.0  # lambda
    epochs: int = 5  # E_re, section 6.1
    batch_size: int = 32  # of D_public, section 6.1
    public_data: str = "train_holdout"  # the repo: test
    fnr_reg: str = "published"
    delta: str = "rest"  # Algorithm 2; the repo: all_others
    fnr_mode: str = "eval"  # the repo: train
    refine_optimizer: str = "same"  # SGD, section 6.1; the repo: adam

    @property
    def leak(self) -> str:
        return "fnr trains on the test set (public_data = test)" if self.public_data == "test" else ""

    def check(self, setting: Setting) -> None:
        if not 0 <= self.p <= 1:
            raise RecipeError(f"fnr: p = {self.p} must lie in [0, 1]")
        if not math.isfinite(self.lam) or self.epochs < 0 or self.batch_size < 1:
            raise RecipeError(
                f"fnr: lam = {self.lam} must be finite, epochs = {self.epochs} at least 0, "
                f"batch_size = {self.batch_size} at least 1"
            )

    def n_refined(self, cohort: int) -> int:
        """|S_re| = floor(n p); the tiny term undoes binary fractions such as 100 * 0.29 = 28.999..."""
        return math.floor(cohort * self.p + 1e-9) if self.epochs else 0

    def exchanges(self, cohort: int) -> Exchanges:
        return Exchanges(round=1 if self.n_refined(cohort) else 0)

    def public_steps(self, job: str) -> Steps:
        return Steps(self.epochs, self.batch_size)

    def look(
        self, task: Task, params: Params, buffers: Params, public: Plan | None, key: Tensor | None = None
    ) -> tuple[Tensor, Params]:
        """Sums over D_public by class, [3, C]: ||h||_2, right answers, samples; and the buffers that this leaves.

        In train mode with a `key`, which dropout draws from; in eval mode without.
        """
        assert public is not None
        if key is not None:
            public = replace(public, sizes=tuple(len(part) for part in torch.split(public.index, self.batch_size)))
        sums: list[Tensor] = []
        for s, batch in enumerate(public):  # never padded: it is the same for everybody
            drawn = None if key is None else fold(key, s)
            out = task.forward(params, buffers, batch.x, train=key is not None, key=drawn)
            buffers, norms = out.buffers, torch.linalg.vector_norm(out.features, dim=1)  # [B]
            hits = (out.logits.argmax(1) == batch.y).to(norms.dtype)
            is_class = one_hot(batch.y, self.n_classes, norms.dtype)  # [B, C]
            sums.append(torch.stack([norms, hits, torch.ones_like(norms)]) @ is_class)
        return torch.stack(sums).sum(0), buffers

    def report(self, task: Task, trace: Trace, view: View, data: Data) -> tuple[Tree, Tree]:
        """Lines 26-27 with Algorithm 1: F_i[c], the mean feature norm of class c (eqs. 6-7), and the accuracy A_i."""
        train = self.fnr_mode == "train"
        sums, buffers = self.look(task, trace.end, trace.buffers, data.public, fold(data.key, LOOK) if train else None)
        norms, _, count = sums
        if train:
            sums, _ = self.look(task, trace.end, buffers, data.public)
        upload = {"F": norms / count.clamp(min=1), "A": sums[1].sum() / count.sum()}
        return upload | ({"buffers": buffers} if train else {}), view.memory

    def after_train(self, server: Server, replies: Reply) -> Asks:
        """Lines 10-14: the floor(n p) clients of lowest accuracy refine their models, which replace their replies."""
        own = replies.upload[self.name]
        replies = replies._replace(buffers=own.get("buffers", replies.buffers))
        # Rows in ascending client order; of equal accuracies the lower id comes first.
        rows = torch.argsort(own["A"], stable=True)[: self.n_refined(len(replies.clients))].sort().values
        total, count = self.others(own["F"], rows)
        delta = total - count * own["F"][rows]  # [n_re, C], Algorithm 2: Delta_j[c] = sum_m (F_m[c] - F_j[c])
        if len(rows) == 0:
            return self.refined(replies, rows, delta, {}, {})

        each: Tree = {}
        if self.fnr_reg == "published":
            each = {"delta": delta}
        elif self.fnr_reg == "signed_live":
            each = {"sum": total, "others": total.new_full((len(rows),), count)}
        elif self.fnr_reg == "squared_live" and count:
            each = {"mean": total / count}
        to = tuple(replies.clients[i] for i in rows.tolist())
        answers: Reply = yield Ask(f"{self.name}.refine", to, {}, {}, {}, {self.name: each})
        answered = torch.tensor([to.index(client) for client in answers.clients], device=rows.device)
        return self.refined(replies, rows[answered], delta[answered], answers.params, answers.buffers)

    def refined(self, replies: Reply, rows: Tensor, delta: Tensor, params: Params, buffers: Params) -> Reply:
        """The replies in which those of `rows` [n_re] were refined with `delta` [n_re, C], and end with these models.

        It is recorded with them who was refined, and with which Delta.
        """
        own = replies.upload[self.name]
        is_refined = torch.zeros_like(own["A"], dtype=torch.bool).index_fill(0, rows, True)
        known = {"refined": is_refined, "delta": torch.zeros_like(own["F"]).index_copy(0, rows, delta)}
        replies = replies._replace(upload=replies.upload | {self.name: own | known})
        if len(rows) == 0:
            return replies

        def replaced(old: Tensor, new: Tensor) -> Tensor:
            return old.index_copy(0, rows, new)

        return replies._replace(
            params=tree_map(replaced, replies.params, params), buffers=tree_map(replaced, replies.buffers, buffers)
        )

    def others(self, norms: Tensor, rows: Tensor) -> tuple[Tensor, int]:
        """(sum over the others m of F_m[c], how many they are) for each row j; [M, C], [n_re] -> [n_re, C]."""
        if self.delta == "all_others":
            return norms.sum(0) - norms[rows], len(norms) - 1
        rest = torch.ones_like(norms[:, 0], dtype=torch.bool).index_fill(0, rows, False)
        return norms[rest].sum(0).expand(len(rows), -1), len(norms) - len(rows)

    def answer(self, job: str, work: Work) -> Answer:
        """Lines 29-43: E_re epochs on D_public of CE + lambda J (eq. 9)."""
        task, buffers, public = work.task, work.buffers, work.data.public
        if self.fnr_mode == "train":
            _, buffers = self.look(task, work.params, buffers, public, fold(work.data.key, LOOK))
        if self.refine_optimizer == "adam":
            task = replace(task, optimizer=Adam(task.lr, weight_decay=task.optimizer.weight_decay))

        def penalty(params: Params, out: Output, batch: Batch) -> Tensor | None:
            return self.lam * self.regulariser(work.view.each, out, batch) if work.view.each else None

        trace = local_steps(
            forward_of(task), task.optimizer, work.params, buffers, task.optimizer.init(work.params), work.data.steps,
            work.data.key, work.grad, Hooks(penalty),
        )  # fmt: skip
        metrics: Tree = {}
        if work.observing:  # figure 5: accuracy on D_public by class, NaN for a class that has no samples there
            before, _ = self.look(task, work.params, buffers, public)
            after, _ = self.look(task, trace.end, trace.buffers, public)
            metrics = {"before": before[1] / before[2], "after": after[1] / after[2]}
        return Answer(trace.end, trace.buffers, {}, work.view.memory, metrics)

    def regulariser(self, each: Tree, out: Output, batch: Batch) -> Tensor:
        """J, where rho_c is the share of class c in the batch: sum_c rho_c v[c] is the mean of v[y] over it."""
        if self.fnr_reg == "published":
            return masked_mean(each["delta"][batch.y], batch.mask)
        # At h = 0, where the norm has no derivative, torch's is 0.
        norms = torch.linalg.vector_norm(out.features, dim=1)  # [B]
        if self.fnr_reg == "signed_live":
            return masked_mean(each["sum"][batch.y] - each["others"] * norms, batch.mask)
        is_class = one_hot(batch.y, self.n_classes, norms.dtype)  # [B, C]
        rho = masked_mean(is_class, batch.mask)
        f = masked_mean(norms[:, None] * is_class, batch.mask) / rho.clamp(min=1e-12)
        j: Tensor = (rho * (each["mean"] - f).square()).sum()
        return j

    def measure(self, state: Tree, update: Update) -> Tree:
        """F [M, C], A [M], who was refined [M], Delta [M, C] (0 for the others); accuracies of the trained models."""
        own = update.replies.upload[self.name]
        found = {key: own[key] for key in ("F", "A", "refined", "delta")}
        return found | {"accuracy_mean": own["A"].mean(), "accuracy_worst": own["A"].min()}
