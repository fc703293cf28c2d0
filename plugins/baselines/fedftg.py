"""FedFTG.
Zhang, Shen, Ding, Tao, Duan: Fine-tuning Global Model via Data-Free Knowledge Distillation for
Non-IID Federated Learning, CVPR 2022. https://arxiv.org/abs/2203.09249. The authors' code:
https://github.com/ZhangLin-PKU/FedFTG

Algorithm 1. The server trains the averaged model further, on inputs from a generator G(z, y). Two
steps alternate. G looks for inputs where student and clients disagree (hard samples) and which the
clients still assign to y. Then the student learns the clients' ensemble on them. Labels follow p(y)
~ sum_k n_k^y (customised label sampling). Client k has the weight alpha_k^y = n_k^y / sum_i n_i^y
for label y (class-level ensemble). Numbers and terms follow the authors' code. They are listed with
what differs:
- Labels are drawn independently. Theirs are split in the fixed proportions p(y) over all iterations
  of a round, and shuffled.
- L_cls weighs each sample's cross-entropy by its own alpha_k^y. Theirs is the mean cross-entropy of
  the batch times the mean weight. L_md is per sample in both.
- The discrepancy is their hard-sample term, mean_c |student - client| of the logits, where the
  clients' logits have no gradient.
- The student's loss is a mean over classes too, so its step is 1/C of server_lr.
- G is a perceptron with one hidden layer for inputs of any shape. Theirs is a convolutional network
  for images. Like theirs, G ends in a tanh, and its output is standardised per channel over the
  batch, as the data are.
- G takes one step on the sum over clients. Theirs takes one step per client in turn, which depends
  on their order.
- The step sizes don't decay, and weight decay is left out. Theirs decay by 0.998 a round, like the
  local step size.
- G is kept between rounds. Its Adam starts afresh in every round, as theirs does.

The running statistics of the student's batch norms move while it learns. Meeting others: the
clients' models are those that enter the average. The student is the model after all methods' server
steps. FedML pair: `make_pair("fedftg")`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedml_noniid.core.component import Change, Exclusive, Needs, Replies, Server, Setting
from fedml_noniid.core.data import Batch, cross_entropies
from fedml_noniid.core.optimizers import SGD, Adam
from fedml_noniid.core.options import (
    MOST,
    Count,
    CountOrNone,
    NonNegative,
    Positive,
    Range,
    RecipeError,
)
from fedml_noniid.core.randomness import fold, normal
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

Model = tuple[Params, Params]  # parameters and buffers


@dataclass(frozen=True)
class FedFTG(LabelCounts):
    """Fine-tunes the average with the clients' ensemble on inputs that a generator makes."""

    name: ClassVar[str] = "fedftg"
    needs: ClassVar[Needs] = Needs(
        local_set=True, whole_models=True, classes=True, replies=Replies.MODELS
    )
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.SERVER_LEARNING})

    iterations: CountOrNone = 10  # I, per round: authors' code
    generator_steps: CountOrNone = 1  # I_g, per iteration: authors' code
    model_steps: CountOrNone = 5  # I_d, per iteration: authors' code
    batch_size: Annotated[int, Range(2, MOST)] = (
        50  # authors' script for CIFAR-10; one sample would be standardised to 0
    )
    noise_dim: Count = 100  # of z: authors' code
    hidden: Count = 256  # of G; ours
    generator_lr: Positive = 0.01  # of Adam: authors' code
    server_lr: Positive = 0.1  # of the model's SGD: authors' code
    lambda_cls: NonNegative = 1.0  # authors' code
    lambda_dis: NonNegative = 1.0  # authors' code

    def check(self, setting: Setting) -> None:
        if setting.tokens:
            raise RecipeError(
                "fedftg: its generator makes samples by gradients, and the tokens of a text "
                "have none; use a model of "
                "images, or fedgen, which generates features"
            )

    def init_server(self, server: Server) -> Tree:
        like, n_out = next(iter(server.params.values())), math.prod(server.input_shape)
        return {
            "generator": init(
                server.key, self.noise_dim, server.task.network.n_classes, self.hidden, n_out, like
            )
        }

    def learn(self, server: Server) -> Change | None:
        """Algorithm 1, I times: I_g steps of G, which widen the discrepancy; then I_d of the model,
        on the same z."""
        if not self.iterations:
            return None
        task, counts = server.task, server.replies.upload["counts"]  # [M, C]
        teachers = list(
            server.client_models()
        )  # in memory: every step of G takes the gradient through all
        params, buffers, g = server.params, server.buffers, server.state["generator"]
        adam, sgd = Adam(self.generator_lr), SGD(self.server_lr)
        state = adam.init(g)
        for i in range(self.iterations):
            key = fold(server.key, i)
            y = draw_labels(fold(key, "y"), counts, self.batch_size)
            z = normal(fold(key, "z"), self.batch_size, self.noise_dim, dtype=counts.dtype)
            weights = label_weights(counts)[:, y]  # alpha_k^y, [M, B]
            hard = partial(self.generator_loss, server, teachers, (params, buffers), weights)
            made = descend(
                gradient_of(task, hard),
                Descent(g, state=state),
                [Batch(z, y)] * self.generator_steps,
                Step(adam),
            )
            g, state = made.params, made.state
            x = self.inputs(server, g, z, y)
            target = self.ensemble(self.predicted(task, teachers, x), weights)
            student = descend(
                gradient_of(task, partial(self.model_loss, task)),
                Descent(params, buffers),
                [Batch(x, target)] * self.model_steps,
                Step(sgd),
                fold(key, "dropout"),
            )
            params, buffers = student.params, student.buffers
        return Change({"generator": g}, params, buffers)

    def inputs(self, server: Server, g: Params, z: Tensor, y: Tensor) -> Tensor:
        """G(z, y): tanh, then mean 0 and variance 1 per channel over batch and positions; [B,
        *input_shape]."""
        x = torch.tanh(generate(g, z, y, server.task.network.n_classes, slope=0.2)).reshape(
            -1, *server.input_shape
        )
        rest = (0, *range(2, x.ndim))
        centred = x - x.mean(rest, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(rest, keepdim=True) + 1e-5)

    @staticmethod
    def predicted(task: Task, models: Sequence[Model], x: Tensor) -> Tensor:
        """Logits in eval mode, [models, B, C]."""
        return torch.stack([task.eval(*model, x).logits for model in models])

    @staticmethod
    def ensemble(logits: Tensor, weights: Tensor) -> Tensor:
        """sum_k alpha_k^y softmax(D(x; w_k)), [B, C]."""
        return (weights[:, :, None] * torch.softmax(logits, dim=2)).sum(0)

    def generator_loss(
        self,
        server: Server,
        teachers: Sequence[Model],
        student: Model,
        weights: Tensor,
        g: Params,
        _: Params,
        batch: Batch,
    ) -> tuple[Tensor, None]:
        """-L_md + lambda_cls L_cls + lambda_dis L_dis, with L_cls = sum_k alpha_k^y CE(D(x; w_k),
        y)."""
        x = self.inputs(server, g, batch.x, batch.y)
        clients, (model,) = (
            self.predicted(server.task, teachers, x),
            self.predicted(server.task, [student], x),
        )
        apart = (weights * (model - clients.detach()).abs().mean(2)).sum(0)  # [B]
        classes = (weights * cross_entropies(clients, batch.y.expand(len(clients), -1))).sum(
            0
        )  # [B]
        value = (self.lambda_cls * classes - apart).mean() + self.lambda_dis * diversity(
            batch.x, x.flatten(1)
        )
        return value, None

    @staticmethod
    def model_loss(task: Task, w: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Output]:
        """-mean over batch and classes of target log softmax(D(x; w)): KL(ensemble || student) / C
        up to a constant."""
        out = task.train(w, buffers, batch)
        return -(batch.y * F.log_softmax(out.logits, dim=1)).mean(), out
