"""FNR-FL. Hu, Qiu, Tang: Feature Norm Regularized Federated Learning: Transforming Skewed Distributions into Global
Insights, 2023. https://arxiv.org/abs/2312.06951

Algorithm 3. Departures, each with its reason:
- D_public is a class-balanced part of the training data that no client holds. The paper leaves it undefined and the
  authors' code takes the test set, which is a leak.
- The loss is a mean over the batch, as everywhere here, not the sum that Algorithm 3 prints.
- J (lines 34-38) is kept as published. Delta_j is a number by then, so J has no gradient and lambda can't matter: what
  works is the fine-tuning on D_public, which has labels.
- p and lambda are not stated in the paper; 0.5 and 1 are the defaults of the authors' code.

As "X+FNR" it refines what X trained, and X's own terms are not part of the refinement. Other components see the
refined models in the average and the unrefined ones in their reports. Buffers of batch norms follow the refinement.
FedML pair: `FNRTrainer`, `FNRAggregator`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from plugins.core.client import local_steps
from plugins.core.component import (
    Answer,
    Ask,
    Asks,
    Batch,
    Component,
    Data,
    Exchanges,
    RecipeError,
    Reply,
    Server,
    Setting,
    Steps,
    Trace,
    View,
    Work,
)
from plugins.core.task import Output, Task, masked_mean
from plugins.core.trees import Params, Tree, tree_map


@dataclass(frozen=True)
class FNR(Component):
    """Refines, on public data, the models of the clients that are worst on it."""

    name: ClassVar[str] = "fnr"
    claims: ClassVar[frozenset[str]] = frozenset({"refinement on public data"})
    passes: ClassVar[frozenset[str]] = frozenset({"public"})
    public: ClassVar[str] = "labelled"

    n_classes: int  # C
    p: float = 0.5  # share of the clients that are refined
    lam: float = 1.0  # lambda
    epochs: int = 5  # E_re, section 6.1
    batch_size: int = 32  # of D_public, section 6.1

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

    def report(self, task: Task, trace: Trace, view: View, data: Data) -> tuple[Tree, Tree]:
        """Lines 26-27 with Algorithm 1: F_i[c], the mean feature norm of class c (eqs. 6-7), and the accuracy A_i."""
        assert data.public is not None

        def sums(batch: Batch) -> Tree:
            out = task.forward(trace.end, trace.buffers, batch.x, train=False)
            mask = torch.ones_like(out.logits[:, 0]) if batch.mask is None else batch.mask.to(out.logits.dtype)
            is_class = torch.nn.functional.one_hot(batch.y, self.n_classes).to(mask.dtype) * mask[:, None]  # [B, C]
            norms = torch.linalg.vector_norm(out.features, dim=1)  # [B]
            hits = (out.logits.argmax(1) == batch.y).to(mask.dtype) * mask
            return {"norms": norms @ is_class, "count": is_class.sum(0), "hits": hits.sum()}

        mean = data.public.mean(sums)
        present = mean["count"] > 0
        norms = torch.where(present, mean["norms"] / mean["count"].clamp(min=1e-12), torch.zeros_like(mean["norms"]))
        return {"F": norms, "A": mean["hits"]}, view.memory

    def after_train(self, server: Server, replies: Reply) -> Asks:
        """Lines 10-14: the floor(n p) clients of lowest accuracy refine their models, which replace their replies."""
        n_re = self.n_refined(len(replies.clients))
        if n_re == 0:
            return replies
        # Rows in ascending client order; of equal accuracies the lower id comes first.
        rows = torch.argsort(replies.upload[self.name]["A"], stable=True)[:n_re].sort().values
        to = tuple(replies.clients[i] for i in rows.tolist())
        delta = self.difference(replies.upload[self.name]["F"], rows)
        refined: Reply = yield Ask(f"{self.name}.refine", to, {}, {}, {}, {self.name: {"delta": delta}})

        def replace(old: Tensor, new: Tensor) -> Tensor:
            return old.index_copy(0, rows, new)

        return replies._replace(
            params=tree_map(replace, replies.params, refined.params),
            buffers=tree_map(replace, replies.buffers, refined.buffers),
        )

    @staticmethod
    def difference(norms: Tensor, rows: Tensor) -> Tensor:
        """Algorithm 2: Delta_j[c] = sum over m in S without S_re of F_m[c] - F_j[c]; [M, C], [n_re] -> [n_re, C]."""
        rest = torch.ones(norms.shape[0], dtype=torch.bool, device=norms.device).index_fill(0, rows, False)
        return norms[rest].sum(0) - rest.sum() * norms[rows]

    def answer(self, job: str, work: Work) -> Answer:
        """Lines 29-43: E_re epochs on D_public of CE + lambda J, J = sum_c rho_c Delta_j[c] (eq. 9)."""
        delta = work.view.each["delta"]  # [C]

        def penalty(params: Params, out: Output, batch: Batch) -> Tensor:
            # sum_c (count_c / |B|) Delta_j[c] is the mean of Delta_j[y] over the batch.
            return self.lam * masked_mean(delta[batch.y], batch.mask)

        trace = local_steps(work.task, work.params, work.buffers, work.data, work.grad, penalty)
        return Answer(trace.end, trace.buffers, {}, work.view.memory, {})
