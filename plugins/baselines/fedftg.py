"""FedFTG. Zhang, Shen, Ding, Tao, Duan: Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID
Federated Learning, CVPR 2022. https://arxiv.org/abs/2203.09249. The authors' code:
https://github.com/ZhangLin-PKU/FedFTG

Algorithm 1: the server trains the average on with inputs that a generator G(z, y) makes. In turn, G looks for inputs
where student and clients disagree (hard samples) that the clients still assign to y, and the student learns the
clients' ensemble on them. Labels follow p(y) ~ sum_k n_k^y (customised label sampling), and client k counts for label y
with alpha_k^y = n_k^y / sum_i n_i^y (class-level ensemble). Numbers and terms are those of the authors' code:
- discrepancy "l1", mean_c |student - client| of the logits with the clients' taken as given, is their hard-sample
  term; "kl" is KL(ensemble || student).
- The student's loss is a mean over classes too, so its step is 1/C of server_lr.
- G is a perceptron with one hidden layer for inputs of any shape, theirs is a convolutional network for images. As
  theirs it ends in a tanh and is then standardised per channel over the batch, as the data are.
- G takes one step on the sum over clients; theirs takes one per client in turn, which hangs on the clients' order.
- The step sizes don't decay, and weight decay is left out; theirs decay by 0.998 a round, with that of local training.
- G outlives the round; its Adam begins anew in every round, as theirs.

Running statistics of the student's batch norms move while it learns. Meeting others: the clients' models are those
that enter the average, the student is the model after everybody's server step. Its FedML pair is `make_pair("fedftg")`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from plugins.baselines.generators import diversity, draw_labels, generate, init, label_weights
from plugins.core.component import (
    Asks,
    Component,
    Data,
    Desk,
    Options,
    RecipeError,
    Server,
    Setting,
    Trace,
    Update,
    View,
)
from plugins.core.noise import fold, normal
from plugins.core.optimizers import SGD, Adam
from plugins.core.task import Task
from plugins.core.training import autograd
from plugins.core.trees import Params, Tree, add, row

Model = tuple[Params, Params]  # parameters and buffers


@dataclass(frozen=True)
class FedFTG(Component):
    """Fine-tunes the average with the clients' ensemble on inputs that a generator makes."""

    name: ClassVar[str] = "fedftg"
    reads_models: ClassVar[bool] = True
    options: ClassVar[Options] = {"discrepancy": ("l1", "kl")}
    claims: ClassVar[frozenset[str]] = frozenset({"distillation on the server"})
    passes: ClassVar[frozenset[str]] = frozenset({"own"})

    n_classes: int  # C
    iterations: int = 10  # I, per round: authors' code
    generator_steps: int = 1  # I_g, per iteration: authors' code
    model_steps: int = 5  # I_d, per iteration: authors' code
    batch_size: int = 50  # authors' script for CIFAR-10
    noise_dim: int = 100  # of z: authors' code
    hidden: int = 256  # of G; ours
    generator_lr: float = 0.01  # of Adam: authors' code
    server_lr: float = 0.1  # of the model's SGD: authors' code
    lambda_cls: float = 1.0  # authors' code
    lambda_dis: float = 1.0  # authors' code
    discrepancy: str = "l1"  # l1, kl: see above

    def check(self, setting: Setting) -> None:
        if setting.tokens:
            raise RecipeError(
                "fedftg: its generator makes samples by gradients, and the tokens of a text have none; use a model of "
                "images, or fedgen, which generates features"
            )
        for key in ("iterations", "generator_steps", "model_steps", "lambda_cls", "lambda_dis"):
            if getattr(self, key) < 0:
                raise RecipeError(f"fedftg: {key} = {getattr(self, key)} must be at least 0")
        # A batch of one is standardised to nothing.
        for key, least in (("batch_size", 2), ("noise_dim", 1), ("hidden", 1)):
            if getattr(self, key) < least:
                raise RecipeError(f"fedftg: {key} = {getattr(self, key)} must be at least {least}")
        if min(self.generator_lr, self.server_lr) <= 0:
            raise RecipeError(
                f"fedftg: generator_lr = {self.generator_lr} and server_lr = {self.server_lr} must be above 0"
            )

    def init_server(self, params: Params, desk: Desk) -> Tree:
        like, n_out = next(iter(params.values())), math.prod(desk.input_shape)
        return {"generator": init(desk.key, self.noise_dim, self.n_classes, self.hidden, n_out, like)}

    def report(self, task: Task, trace: Trace, view: View, data: Data) -> tuple[Tree, Tree]:
        """n_k^y, [C]."""
        assert data.own is not None
        return {"counts": data.own.class_counts(self.n_classes).to(trace.loss.dtype)}, view.memory

    def after_step(self, server: Server, update: Update, desk: Desk) -> Asks:
        """Algorithm 1: I times, I_g steps of G, which widens the discrepancy, then I_d of the model, on the same z."""
        if self.iterations == 0:
            return server
        replies = update.replies
        counts = replies.upload[self.name]["counts"]  # [M, C]
        teachers = [(row(replies.params, k), row(replies.buffers, k)) for k in range(len(replies.clients))]
        params, buffers, g = server.params, server.buffers, server.state[self.name]["generator"]
        adam, sgd = Adam(self.generator_lr), SGD(self.server_lr)
        adam_state, sgd_state = adam.init(g), sgd.init(params)
        for i in range(self.iterations):
            key = fold(desk.key, i)
            y = draw_labels(fold(key, 0), counts, self.batch_size)
            z = normal(fold(key, 1), self.batch_size, self.noise_dim, dtype=counts.dtype)
            weights = label_weights(counts)[:, y]  # alpha_k^y, [M, B]
            for _ in range(self.generator_steps):
                loss = partial(self.generator_loss, desk, teachers, (params, buffers), weights, y, z)
                grads, _ = autograd(loss, g)
                step, adam_state = adam.step(grads, adam_state, g)
                g = add(g, step)
            x = self.inputs(desk, g, z, y)
            target = self.ensemble(self.logits(desk.task, teachers, x), weights)
            for s in range(self.model_steps):
                loss = partial(self.model_loss, desk.task, buffers, x, target, fold(fold(key, 2), s))
                grads, buffers = autograd(loss, params)
                step, sgd_state = sgd.step(grads, sgd_state, params)
                params = add(params, step)
        return Server(params, buffers, server.state | {self.name: {"generator": g}})
        yield

    def inputs(self, desk: Desk, g: Params, z: Tensor, y: Tensor) -> Tensor:
        """G(z, y): tanh, then mean 0 and variance 1 per channel over batch and positions; [B, *input_shape]."""
        x = torch.tanh(generate(g, z, y, self.n_classes, slope=0.2)).reshape(-1, *desk.input_shape)
        rest = (0, *range(2, x.ndim))
        centred = x - x.mean(rest, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(rest, keepdim=True) + 1e-5)

    @staticmethod
    def logits(task: Task, models: list[Model], x: Tensor) -> Tensor:
        """In eval mode, [models, B, C]."""
        return torch.stack([task.forward(*model, x, train=False).logits for model in models])

    @staticmethod
    def ensemble(logits: Tensor, weights: Tensor) -> Tensor:
        """sum_k alpha_k^y softmax(D(x; w_k)), [B, C]."""
        return (weights[:, :, None] * torch.softmax(logits, dim=2)).sum(0)

    def generator_loss(
        self, desk: Desk, teachers: list[Model], student: Model, weights: Tensor, y: Tensor, z: Tensor, g: Params
    ) -> tuple[Tensor, Tree]:
        """-L_md + lambda_cls L_cls + lambda_dis L_dis, with L_cls = sum_k alpha_k^y CE(D(x; w_k), y)."""
        x = self.inputs(desk, g, z, y)
        clients, (model,) = self.logits(desk.task, teachers, x), self.logits(desk.task, [student], x)
        if self.discrepancy == "l1":
            apart = (weights * (model - clients.detach()).abs().mean(2)).sum(0)  # [B]
        else:
            target = self.ensemble(clients.detach(), weights)
            apart = F.kl_div(F.log_softmax(model, dim=1), target, reduction="none").sum(1)
        losses = torch.stack([F.cross_entropy(of, y, reduction="none") for of in clients])  # [M, B]
        classes = (weights * losses).sum(0)
        value = (self.lambda_cls * classes - apart).mean() + self.lambda_dis * diversity(z, x.flatten(1))
        return value, {}

    @staticmethod
    def model_loss(
        task: Task, buffers: Params, x: Tensor, target: Tensor, key: Tensor, params: Params
    ) -> tuple[Tensor, Tree]:
        """-mean over batch and classes of target log softmax(D(x; w)): KL(ensemble || student) / C up to a constant."""
        out = task.forward(params, buffers, x, train=True, key=key)
        return -(target * F.log_softmax(out.logits, dim=1)).mean(), out.buffers
