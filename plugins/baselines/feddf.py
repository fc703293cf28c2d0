"""FedDF. Lin, Kong, Stich, Jaggi: Ensemble Distillation for Robust Model Fusion in Federated Learning, NeurIPS 2020.
https://arxiv.org/abs/2006.07242. The authors' code: https://github.com/epfml/federated-learning-public-code

Algorithm 1: the server starts from the average of the clients and distils the mean of their logits (AVGLOGITS) into it
on unlabelled data, here the public split without its labels.
- A fixed number of steps. The authors take up to 10,000 and stop when a labelled validation set sees no progress for
  1,000 to 2,000; the server has no labels here, and which model a run ends with should not hang on them.
- The teachers answer in eval mode, once for the whole split. The student is in train mode, as in the authors' code:
  its batch norms' running statistics move to the public data, on top of the clients' average.
- As in the authors' code, the loss has no factor T^2 and the gradient is clipped.
- Every step is one of an epoch over the split in a new order; the last batch of an epoch may be short.

Meeting others: the teachers are the models that enter the average (FNR-FL: the refined ones), and the student is the
model after everybody's server step. Its FedML pair is `make_pair("feddf")`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from plugins.core.component import Asks, Component, Desk, RecipeError, Reply, Server, Setting, Update
from plugins.core.noise import fold, permutation
from plugins.core.optimizers import Adam
from plugins.core.task import Task
from plugins.core.training import autograd
from plugins.core.trees import Params, Tree, add, norm, row, scale

PASS_BATCH = 500  # samples per batch of the teachers' pass
DROPS = -3  # which of the round's keys is for the student's dropout; 0, 1, ... are for the epochs' orders


@dataclass(frozen=True)
class FedDF(Component):
    """Distils the ensemble of the clients into their average."""

    name: ClassVar[str] = "feddf"
    reads_models: ClassVar[bool] = True
    claims: ClassVar[frozenset[str]] = frozenset({"distillation on the server"})
    public: ClassVar[str] = "unlabelled"

    steps: int = 500  # ours; authors' code: up to 10,000, see above
    batch_size: int = 128  # authors' code
    server_lr: float = 1e-3  # of Adam, falling to 0 along a cosine: authors' code
    T: float = 1.0  # temperature: authors' code
    clip: float = 5.0  # largest norm of the gradient: authors' code

    def check(self, setting: Setting) -> None:
        if self.steps < 0 or self.batch_size < 1:
            raise RecipeError(
                f"feddf: steps = {self.steps} must be at least 0, batch_size = {self.batch_size} at least 1"
            )
        if min(self.server_lr, self.T, self.clip) <= 0:
            raise RecipeError(
                f"feddf: server_lr = {self.server_lr}, T = {self.T} and clip = {self.clip} must be above 0"
            )

    def after_step(self, server: Server, update: Update, desk: Desk) -> Asks:
        """Algorithm 1, lines 8-10: x <- x - eta_s dKL(softmax(mean_k f(x_k) / T) || softmax(f(x) / T)) / dx."""
        if self.steps == 0:
            return server
        assert desk.public is not None
        x = desk.public.x
        target = torch.softmax(self.mean_logits(desk.task, update.replies, x) / self.T, dim=1)  # [n, C]
        params, buffers = server.params, server.buffers
        optimizer = Adam(self.server_lr)
        state = optimizer.init(params)
        for s, batch in enumerate(self.batches(desk.key, len(x))):
            key = fold(fold(desk.key, DROPS), s)
            loss = partial(self.divergence, desk.task, buffers, x[batch], target[batch], key)
            grads, buffers = autograd(loss, params)
            grads = scale((self.clip / (norm(grads) + 1e-6)).clamp(max=1), grads)
            step, state = optimizer.step(grads, state, params)
            params = add(params, scale((1 + math.cos(math.pi * s / self.steps)) / 2, step))
        return server._replace(params=params, buffers=buffers)
        yield

    @staticmethod
    def mean_logits(task: Task, replies: Reply, x: Tensor) -> Tensor:
        """1/M sum_k f(x_k), [n, C]."""
        total: Tensor | None = None
        for k in range(len(replies.clients)):
            model = row(replies.params, k), row(replies.buffers, k)
            logits = torch.cat([task.forward(*model, part, train=False).logits for part in torch.split(x, PASS_BATCH)])
            total = logits if total is None else total + logits
        assert total is not None
        return total / len(replies.clients)

    def divergence(
        self, task: Task, buffers: Params, x: Tensor, target: Tensor, key: Tensor, params: Params
    ) -> tuple[Tensor, Tree]:
        """Mean over the batch of KL(target || softmax(f(x) / T)), and the student's next buffers."""
        out = task.forward(params, buffers, x, train=True, key=key)
        return F.kl_div(F.log_softmax(out.logits / self.T, dim=1), target, reduction="batchmean"), out.buffers

    def batches(self, key: Tensor, n: int) -> list[Tensor]:
        """`steps` batches of positions, epoch after epoch."""
        epochs = math.ceil(self.steps / math.ceil(n / self.batch_size))
        orders = [permutation(fold(key, e), n) for e in range(epochs)]
        return [batch for order in orders for batch in torch.split(order, self.batch_size)][: self.steps]
