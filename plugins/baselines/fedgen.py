"""FedGen. Zhu, Hong, Zhou: Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021.
https://arxiv.org/abs/2105.10056. The authors' code: https://github.com/zhuangdizhu/FedGen

Algorithm 1: the server trains a generator G(y, eps) of features that the clients' classifiers assign to y, and the
clients train their models on with it from round 2 on. The terms are those of the authors' code for MNIST:
- client: CE + w_t [alpha' CE(head(G(y', eps)), y') + beta' KL(head(G(y, eps)) || own prediction)], the KL with the
  labels y of the mini-batch and no gradient through the head, w_t = 0.98^(t - 1), alpha' and beta' `generative_*`.
  Their factor gen_batch_size / batch_size is 1 by default and left out, as are the floor of 1e-4 under the weights
  (round 570) and the end of the terms after 20 local epochs. The weights of 10 belong to their local step size of
  0.01; with 0.1 on digits they keep the model from learning, and weights of 1 help.
- server: alpha teacher + eta diversity - beta student, beta = 0. The student is the new average, theirs that before it.
- eps is uniform in [0, 1), as in their code; the paper says normal. Adam's state outlives the round, its step size
  decays like w_t.
- y' is uniform over all C classes. Theirs are the labels that occur at some client, which is the same unless a class
  has no samples at all.
- The server's y follow the cohort's label counts, as in the paper; their code draws uniformly from labels with counts
  above 1. Counts are those of the local set, theirs those of the batches seen plus one.
- G has no batch norm: its running statistics would be sent beside its weights. Its output is linear, as theirs;
  features behind a ReLU have no negative values, G's may.

Meeting others: the teachers are the models that enter the average; "own prediction" is what the model says, before
another method changes its logits. Its FedML pair is `make_pair("fedgen")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from plugins.baselines.generators import diversity, draw_labels, generate, init, label_weights
from plugins.core.component import Asks, Batch, Component, Data, Desk, RecipeError, Server, Setting, Trace, Update, View
from plugins.core.noise import fold, integers, uniform
from plugins.core.optimizers import Adam
from plugins.core.task import Output, Task, masked_mean
from plugins.core.training import autograd
from plugins.core.trees import Params, Tree, add, row, scale


@dataclass(frozen=True)
class FedGen(Component):
    """Trains a generator of features on the server, whose features the clients learn from."""

    name: ClassVar[str] = "fedgen"
    reads_models: ClassVar[bool] = True
    passes: ClassVar[frozenset[str]] = frozenset({"own"})

    n_classes: int  # C
    feature_size: int  # d
    generative_alpha: float = 10.0  # of the client's CE on G(y'): authors' code, MNIST
    generative_beta: float = 10.0  # of the client's KL on G(y): authors' code, MNIST
    decay: float = 0.98  # of these weights and of the generator's step size, per round: authors' code
    gen_batch_size: int = 32  # y' per local step: authors' code
    hidden: int = 256  # of G: authors' code, MNIST
    noise_dim: int = 32  # of eps: authors' code, MNIST
    steps: int = 50  # of G per round: authors' code
    batch_size: int = 32  # of these: authors' code
    generator_lr: float = 3e-4  # of Adam: authors' code, MNIST
    weight_decay: float = 0.01  # of G: authors' code
    alpha: float = 1.0  # teacher loss: authors' code
    eta: float = 1.0  # diversity loss: authors' code
    beta: float = 0.0  # student loss: authors' code

    def check(self, setting: Setting) -> None:
        for key in ("generative_alpha", "generative_beta", "weight_decay", "alpha", "eta", "beta", "steps"):
            if getattr(self, key) < 0:
                raise RecipeError(f"fedgen: {key} = {getattr(self, key)} must be at least 0")
        for key in ("gen_batch_size", "hidden", "noise_dim", "batch_size"):
            if getattr(self, key) < 1:
                raise RecipeError(f"fedgen: {key} = {getattr(self, key)} must be at least 1")
        if not 0 < self.decay <= 1 or not self.generator_lr > 0:
            raise RecipeError(
                f"fedgen: decay = {self.decay} must lie in (0, 1], generator_lr = {self.generator_lr} above 0"
            )

    def init_server(self, params: Params, desk: Desk) -> Tree:
        like = next(iter(params.values()))
        generator = init(desk.key, self.noise_dim, self.n_classes, self.hidden, self.feature_size, like)
        return {"generator": generator, "adam": self.adam.init(generator), "round": like.new_zeros(())}

    @property
    def adam(self) -> Adam:
        return Adam(self.generator_lr, weight_decay=self.weight_decay)

    def broadcast(self, state: Tree) -> Tree:
        """G and w_t: 0 in round 1, decay^(t - 1) from round 2 on."""
        past = state["round"]
        return {"generator": state["generator"], "weight": torch.where(past > 0, self.decay**past, 0 * past)}

    def penalty(self, task: Task, params: Params, out: Output, batch: Batch, view: View) -> Tensor:
        """w_t [alpha' CE(head(G(y', eps')), y') + beta' mean_B KL(softmax(head(G(y, eps))) || softmax(own logits))]."""
        key = batch.key
        assert key is not None

        def logits(y: Tensor, number: int) -> Tensor:
            eps = uniform(fold(key, number), len(y), self.noise_dim, dtype=out.logits.dtype)
            return task.classify(params, generate(view.shared["generator"], eps, y, self.n_classes))

        y = integers(fold(key, 0), self.n_classes, self.gen_batch_size)
        teacher = F.cross_entropy(logits(y, 1), y)
        target = torch.softmax(logits(batch.y, 2), dim=1).detach()  # [B, C]
        apart = (torch.xlogy(target, target) - target * torch.log_softmax(out.logits, dim=1)).sum(1)  # [B]
        latent = masked_mean(apart, batch.mask)
        value: Tensor = view.shared["weight"] * (self.generative_alpha * teacher + self.generative_beta * latent)
        return value

    def report(self, task: Task, trace: Trace, view: View, data: Data) -> tuple[Tree, Tree]:
        """n_k^y, [C]."""
        assert data.own is not None
        return {"counts": data.own.class_counts(self.n_classes).to(trace.loss.dtype)}, view.memory

    def after_step(self, server: Server, update: Update, desk: Desk) -> Asks:
        """Algorithm 1, lines 10-13: `steps` steps of G on the loss below."""
        state = server.state[self.name]
        generator, adam = state["generator"], state["adam"]
        counts = update.replies.upload[self.name]["counts"]  # [M, C]
        teachers = [row(update.replies.params, k) for k in range(len(update.replies.clients))]
        for s in range(self.steps):
            key = fold(desk.key, s)
            y = draw_labels(fold(key, 0), counts, self.batch_size)
            eps = uniform(fold(key, 1), self.batch_size, self.noise_dim, dtype=counts.dtype)
            loss = partial(self.objective, desk.task, teachers, server.params, label_weights(counts)[:, y], y, eps)
            grads, _ = autograd(loss, generator)
            step, adam = self.adam.step(grads, adam, generator)
            generator = add(generator, scale(self.decay ** state["round"], step))
        new = {"generator": generator, "adam": adam, "round": state["round"] + 1}
        return server._replace(state=server.state | {self.name: new})
        yield

    def objective(
        self, task: Task, teachers: list[Params], student: Params, weights: Tensor, y: Tensor, eps: Tensor, g: Params
    ) -> tuple[Tensor, Tree]:
        """alpha mean_B sum_k w_k^y CE(head_k(G), y) + eta diversity - beta KL(sum_k w_k^y head_k(G) || student(G))."""
        features = generate(g, eps, y, self.n_classes)
        logits = torch.stack([task.classify(w_k, features) for w_k in teachers])  # [M, B, C]
        losses = torch.stack([F.cross_entropy(of, y, reduction="none") for of in logits])  # [M, B]
        value = self.alpha * (weights * losses).sum(0).mean() + self.eta * diversity(eps, features)
        if self.beta:
            target = torch.softmax((weights[:, :, None] * logits).sum(0), dim=1)
            prediction = F.log_softmax(task.classify(student, features), dim=1)
            value = value - self.beta * F.kl_div(prediction, target, reduction="none").mean()  # over B and C, as theirs
        return value, {}
