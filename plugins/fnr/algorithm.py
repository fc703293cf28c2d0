"""FNR-FL.
Hu, Qiu, Tang: Feature Norm Regularized Federated Learning: Transforming Skewed Distributions into
Global Insights, 2023. https://arxiv.org/abs/2312.06951

Algorithm 3 with algorithms 1 and 2. `authors.py` has the readings of the authors' code. Departures
and choices:
- The paper does not define D_public. Here it is a class-balanced part of the training data that no
  client holds.
- The loss is a mean over the batch, as everywhere here, not the sum that Algorithm 3 prints.
- J (lines 34-38) is kept as published. Delta_j is a constant there, so J has no gradient and lambda
  has no effect. The gain comes from the fine-tuning on D_public, which has labels.
- The other clients m are those of Algorithm 2: S without S_re. F_i and A_i are computed in eval
  mode.
- Phase 2 takes the optimiser of local training with an empty memory, and D_public as it is, also
  with `augment`.
- p and lambda are not stated in the paper; 0.5 and 1 are the defaults of the authors' code.
- If A_i are equal, the lower id is refined first. An empty S_re gives FedAvg; with S_re = S,
  Delta_j is 0.
- In a deployment a defence may drop a refined model. That client then counts with its model of
  phase 1: the defence accepted it, and other methods read values of phase 1 (below).

Meeting others: "X+FNR" refines the models that X trained. The refinement leaves out X's terms, but
uses an optimiser that X brings (SGDM). The refined models enter the average and the direction of
X's step. Reports and memories (SCAFFOLD's c_i, FedNova's a_i, FedDyn's g_k and h by
`Server.trained`) have phase 1 only. The refinement leaves a fixed head (FedBABU) alone too. Buffers
of batch norms follow the refinement. FedML pair: `FNRTrainer`, `FNRAggregator`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedml_noniid.core.component import (
    Answer,
    Ask,
    Asks,
    Change,
    Client,
    Component,
    Exchanges,
    Exclusive,
    Needs,
    Public,
    Replies,
    Server,
    Setting,
    Trace,
)
from fedml_noniid.core.data import Batch, cross_entropy, one_hot
from fedml_noniid.core.options import Count, CountOrNone, Fraction, Range
from fedml_noniid.core.sums import added
from fedml_noniid.core.task import Output
from fedml_noniid.core.training import Descent, Step, descend, gradient_of
from fedml_noniid.core.trees import Params, Tree, tree_map
from fedml_noniid.plugins.fnr.recorded import by_client, figure_5


@dataclass(frozen=True)
class FNR(Component):
    """Refines the clients' models that are worst on public data, by training on these data."""

    name: ClassVar[str] = "fnr"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.REFINEMENT})
    ranges: ClassVar[Mapping[str, Range]] = {"F": Range(0), "A": Range(0, 1)}

    p: Fraction = 0.5  # fraction of the cohort that is refined
    lam: float = 1.0  # lambda
    epochs: CountOrNone = 5  # E_re, section 6.1
    batch_size: Count = 32  # of D_public, section 6.1

    @property
    def needs(self) -> Needs:
        return Needs(
            public=Public.LABELLED,
            features=True,
            whole_models=True,
            classes=True,
            replies=Replies.MODELS,
        )

    def n_refined(self, cohort: int) -> int:
        """|S_re| = floor(n p); the tiny term undoes binary fractions such as 100 * 0.29 =
        28.999..."""
        return math.floor(cohort * self.p + 1e-9) if self.epochs else 0

    def exchanges(self, setting: Setting) -> Exchanges:
        return Exchanges(round=1 if self.n_refined(setting.cohort) else 0)

    def report(self, trace: Trace, client: Client) -> Answer:
        """Lines 26-27 with Algorithm 1: F_i[c], the mean feature norm of class c
        (eqs. 6-7), and the accuracy A_i.
        """
        norms, hits, count = self.by_class(client, trace.params, trace.buffers)
        return Answer({"F": norms / count.clamp(min=1), "A": hits.sum() / count.sum()})

    def by_class(self, client: Client, w: Params, buffers: Params) -> Tensor:
        """Sums over D_public by class, [3, C]: ||h||_2, right answers, samples."""

        def sums(batch: Batch) -> Tree:
            out = client.task.eval(w, buffers, batch.x)
            return {"sums": class_sums(out, batch)}

        totals: Tensor = client.public.total(sums)["sums"]
        return totals

    def refine(self, server: Server) -> Asks:
        """Lines 10-14: the floor(n p) clients of lowest A_i refine; their refined models replace
        the old ones."""
        replies, sent = server.replies, server.replies.upload
        norms, accuracy = sent["F"], sent["A"]  # [M, C], [M]
        worst = (
            torch.argsort(accuracy, stable=True)[: self.n_refined(len(accuracy))].sort().values
        )  # S_re, [n_re]
        total, count = self.others(norms, worst)
        delta = (
            total - count * norms[worst]
        )  # Algorithm 2: Delta_j[c] = sum_m (F_m[c] - F_j[c]), [n_re, C]
        refined = worst
        if len(worst):
            to = tuple(replies.clients[j] for j in worst.tolist())
            answered = yield Ask("refine", to, each=self.each(delta, total, count))
            refined = torch.tensor(
                [replies.clients.index(k) for k in answered.clients], device=worst.device
            )
            old, new = (
                {"deltas": reply.deltas, "buffers": reply.buffers} for reply in (replies, answered)
            )
            models = tree_map(lambda old, new: old.index_copy(0, refined, new), old, new)
            replies = replace(replies, **models)
        return replace(replies, upload=sent | by_client(norms, worst, delta, refined))

    def others(self, norms: Tensor, worst: Tensor) -> tuple[Tensor, int]:
        """(sum of F_m[c] over the others m, their number) for each j in S_re, [n_re, C]: m in S
        without S_re."""
        count = len(norms) - len(worst)
        is_worst = torch.zeros_like(norms[:, 0], dtype=torch.int8).index_fill(0, worst, 1)
        rest = is_worst.argsort(stable=True)[
            :count
        ]  # a boolean mask would make a GPU's host wait for its number
        return added(norms[rest]).expand(len(worst), -1), count

    def each(self, delta: Tensor, total: Tensor, count: int) -> Tree:
        """What a client needs for its J, leaves [n_re, ...]."""
        return {"delta": delta}

    def answer(self, client: Client) -> Answer:
        """Lines 29-43: E_re epochs on D_public of CE + lambda J (eq. 9); starts at the client's own
        model."""

        def loss(w: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Output]:
            out = client.task.train(w, buffers, batch)
            return cross_entropy(out.logits, batch.y, None) + self.lam * self.regulariser(
                out, batch, client
            ), out

        start, step = Descent(client.params, client.buffers), Step(client.task.optimizer)
        key = client.key
        batches = client.public.shuffled(key, self.epochs, self.batch_size)
        end = descend(gradient_of(client.task, loss), start, batches, step, key)
        metrics: Tree = {}
        if client.observing:
            before = self.by_class(client, client.params, client.buffers)
            metrics = figure_5(before, self.by_class(client, end.params, end.buffers))
        return Answer(params=end.params, buffers=end.buffers, metrics=metrics)

    def regulariser(self, out: Output, batch: Batch, client: Client) -> Tensor:
        """Lines 34-38: J = sum_c rho_c Delta_j[c], rho_c the fraction of class c in the batch."""
        mean: Tensor = client.each["delta"][batch.y].mean()
        return mean

    def step(self, server: Server) -> Change:
        """Only records: F [M, C], A [M], the refined clients [M], Delta [M, C] (0 for the
        others)."""
        uploads = server.replies.upload
        return Change(
            metrics=uploads
            | {"accuracy_mean": uploads["A"].mean(), "accuracy_worst": uploads["A"].min()}
        )


def class_sums(out: Output, batch: Batch) -> Tensor:
    """Sums over a batch by class, [3, C]: ||h||_2, right answers, samples."""
    norms = torch.linalg.vector_norm(out.features, dim=1)  # [B]
    hits = (out.logits.argmax(1) == batch.y).to(norms.dtype)
    return torch.stack([norms, hits, torch.ones_like(norms)]) @ one_hot(
        batch.y, out.logits.shape[1], norms.dtype
    )
