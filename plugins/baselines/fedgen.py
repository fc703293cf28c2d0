"""FedGen.
Zhu, Hong, Zhou: Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021.
https://arxiv.org/abs/2105.10056. The authors' code: https://github.com/zhuangdizhu/FedGen

Algorithm 1. The server trains a generator G(y, eps) of features that the clients' classifiers
assign to y. From round 2 on, the clients train with these features too. The terms follow the
authors' code for MNIST. They are listed with what differs:
- client: CE + w_t [alpha' CE(head(G(y', eps)), y') + beta' KL(head(G(y, eps)) || prediction)].
  The KL has the labels y of the mini-batch and no gradient through the head. w_t = 0.98^(t - 1);
  alpha' and beta' are `generative_*`. Three things of theirs are left out: the factor
  gen_batch_size / batch_size, which is 1 by default, the floor of 1e-4 under the weights (round
  570), and the end of the terms after 20 local epochs. The weights of 10 belong to their local step
  size of 0.01. With 0.1 on digits they keep the model from learning, and weights of 1 help.
- server: alpha teacher + eta diversity - beta student, beta = 0. The student is the new model;
  theirs is the old one. The teacher term weighs each sample's CE by its own w_k^y. Their product of
  a column [B, 1] and a row [B] is the mean CE of the batch times the mean weight.
- eps is uniform in [0, 1), as in their code; the paper says normal. Adam's state is kept between
  rounds. Its step size decays like w_t.
- y' is uniform over all C classes. The authors draw from the labels that at least one client has.
  This differs only if a class has no samples at all.
- The server's y follow the cohort's label counts, as in the paper; their code draws uniformly from
  labels with counts above 1. The counts are those of the local set. The authors count the labels of
  the batches and add one.
- G has no batch norm, because its running statistics would be sent beside the weights. Its output
  is linear, as in their code. It may be negative, unlike features behind a ReLU.

Meeting others: the teachers are the models that enter the average. The student is the model after a
learner such as FedDF. The prediction is that of the model, before another method changes the
logits. Its FedML pair is `make_pair("fedgen")`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedml_noniid.core.component import Change, Client, Needs, Replies, Server
from fedml_noniid.core.data import Batch, cross_entropies
from fedml_noniid.core.optimizers import Adam
from fedml_noniid.core.options import Count, CountOrNone, NonNegative, Positive, Share
from fedml_noniid.core.randomness import fold, integers, uniform
from fedml_noniid.core.task import Output, Task
from fedml_noniid.core.training import Descent, Step, descend, gradient_of
from fedml_noniid.core.trees import Params, Tree
from fedml_noniid.plugins.baselines.generators import (
    LabelCounts,
    diversity,
    draw_labels,
    generate,
    init,
    label_weights,
)


@dataclass(frozen=True)
class FedGen(LabelCounts):
    """Trains a generator of features on the server; the clients learn from its features."""

    name: ClassVar[str] = "fedgen"
    needs: ClassVar[Needs] = Needs(
        local_set=True, features=True, classifier=True, classes=True, replies=Replies.MODELS
    )

    generative_alpha: NonNegative = 10.0  # of the client's CE on G(y'): authors' code, MNIST
    generative_beta: NonNegative = 10.0  # of the client's KL on G(y): authors' code, MNIST
    decay: Share = 0.98  # of both generative weights and of G's step size, per round: authors' code
    gen_batch_size: Count = 32  # y' per local step: authors' code
    hidden: Count = 256  # of G: authors' code, MNIST
    noise_dim: Count = 32  # of eps: authors' code, MNIST
    steps: CountOrNone = 50  # of G per round: authors' code
    batch_size: Count = 32  # samples per step of G: authors' code
    generator_lr: Positive = 3e-4  # of Adam: authors' code, MNIST
    weight_decay: NonNegative = 0.01  # of G: authors' code
    alpha: NonNegative = 1.0  # teacher loss: authors' code
    eta: NonNegative = 1.0  # diversity loss: authors' code
    beta: NonNegative = 0.0  # student loss: authors' code

    @property
    def adam(self) -> Adam:
        return Adam(self.generator_lr, weight_decay=self.weight_decay)

    def init_server(self, server: Server) -> Tree:
        like, net = next(iter(server.params.values())), server.task.network
        generator = init(
            server.key, self.noise_dim, net.n_classes, self.hidden, net.feature_size, like
        )
        return {"generator": generator, "adam": self.adam.init(generator)}

    def broadcast(self, server: Server) -> Tree:
        """G and w_t: 0 in round 1, decay^(t - 1) from round 2 on."""
        weight = self.decay ** (server.round - 1) if server.round > 1 else 0.0
        generator = server.state["generator"]
        return {"generator": generator, "weight": generator["b1"].new_tensor(weight)}

    def penalty(self, w: Params, out: Output, batch: Batch, client: Client) -> Tensor:
        """w_t [alpha' CE(head(G(y', eps')), y') + beta' mean_B KL(softmax(head(G(y, eps))) ||
        softmax(logits))]."""
        key, n_classes = batch.key, client.task.network.n_classes
        assert key is not None

        def logits(y: Tensor, word: str) -> Tensor:
            eps = uniform(fold(key, word), len(y), self.noise_dim, dtype=out.logits.dtype)
            return client.task.classify(w, generate(client.shared["generator"], eps, y, n_classes))

        y = integers(fold(key, "y'"), n_classes, self.gen_batch_size)
        teacher = cross_entropies(logits(y, "eps'"), y).mean()
        target = torch.softmax(logits(batch.y, "eps"), dim=1).detach()  # [B, C]
        apart = (torch.xlogy(target, target) - target * torch.log_softmax(out.logits, dim=1)).sum(
            1
        )  # [B]
        latent = batch.mean(apart)
        weight: Tensor = client.shared["weight"]
        return weight * (self.generative_alpha * teacher + self.generative_beta * latent)

    def survey(self, server: Server) -> Change | None:
        """Algorithm 1, lines 10-13: `steps` steps of G on the objective below."""
        if server.round == 0:
            return None
        counts = server.replies.upload["counts"]  # [M, C]
        head = server.task.network.layers[-1].parameters
        teachers = [
            {name: w[name] for name in head if name in w} for w, _ in server.client_models()
        ]

        def draws() -> Iterator[Batch]:
            for s in range(self.steps):
                key = fold(server.key, s)
                eps = uniform(fold(key, "eps"), self.batch_size, self.noise_dim, dtype=counts.dtype)
                yield Batch(eps, draw_labels(fold(key, "y"), counts, self.batch_size))

        def loss(g: Params, buffers: Params, batch: Batch) -> tuple[Tensor, None]:
            weights = label_weights(counts)[:, batch.y]  # [M, B]
            return self.objective(
                server.task, teachers, server.params, weights, batch.y, batch.x, g
            ), None

        descent = descend(
            gradient_of(server.task, loss),
            Descent(server.state["generator"], state=server.state["adam"]),
            draws(),
            Step(self.adam, rate=lambda s: self.decay ** (server.round - 1)),
        )
        return Change({"generator": descent.params, "adam": descent.state})

    def objective(
        self,
        task: Task,
        teachers: list[Params],
        student: Params,
        weights: Tensor,
        y: Tensor,
        eps: Tensor,
        g: Params,
    ) -> Tensor:
        """alpha mean_B sum_k w_k^y CE(head_k(G), y) + eta diversity - beta KL(sum_k w_k^y head_k(G)
        || student(G))."""
        features = generate(g, eps, y, task.network.n_classes)
        logits = torch.stack([task.classify(w_k, features) for w_k in teachers])  # [M, B, C]
        losses = cross_entropies(logits, y.expand(len(logits), -1))  # [M, B]
        value = self.alpha * (weights * losses).sum(0).mean() + self.eta * diversity(eps, features)
        if self.beta:
            target = torch.softmax((weights[:, :, None] * logits).sum(0), dim=1)
            prediction = F.log_softmax(task.classify(student, features), dim=1)
            value = (
                value - self.beta * F.kl_div(prediction, target, reduction="none").mean()
            )  # over B and C, as theirs
        return value
