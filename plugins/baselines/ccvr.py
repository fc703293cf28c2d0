"""CCVR. Luo, Chen, Hu, Zhang, Liang, Feng: No Fear of Heterogeneity: Classifier Calibration for Federated Learning
with Non-IID Data, NeurIPS 2021. https://arxiv.org/abs/2106.05001

Section 4: after the last round every client sends, per class, the mean and the covariance of its features and its
count; the server pools them, draws virtual features from the Gaussians, and trains the classifier on with them.
- The covariance is the unbiased one (n - 1), and the pool is exactly that of all clients' features together. It goes up
  as its upper triangle: C (d + d (d + 1) / 2 + 1) floats, once. A class of fewer than two samples has covariance 0.
- A draw is mu + Sigma^(1/2) z with the symmetric root, by eigenvalues: those below rounding are taken as 0. Cholesky
  fails where Sigma is singular (fewer samples than d, neurons that are never active), and a jitter would add noise
  there. The symmetric root doesn't depend on the eigenvectors' signs or order.
- The Gaussians have negative values although features behind a ReLU have none; as in the paper, nothing is clipped.
- We found no code of the authors; the training's numbers are those of https://github.com/smduan/Fed-CCVR.

Meeting others: the model that is calibrated is the evaluated one. FedBABU, which freezes the classifier, is refused.
Its FedML pair is `make_pair("ccvr")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from plugins.core.component import (
    Answer,
    Ask,
    Asks,
    Batch,
    Component,
    Desk,
    Exchanges,
    RecipeError,
    Reply,
    Server,
    Setting,
    Work,
)
from plugins.core.noise import fold, normal, permutation
from plugins.core.optimizers import SGD
from plugins.core.task import Task, cross_entropy, one_hot
from plugins.core.training import autograd
from plugins.core.trees import Params, Tree, add


@dataclass(frozen=True)
class CCVR(Component):
    """Trains the classifier on features that are drawn from the pooled Gaussian of every class."""

    name: ClassVar[str] = "ccvr"
    claims: ClassVar[frozenset[str]] = frozenset({"classifier"})
    passes: ClassVar[frozenset[str]] = frozenset({"own"})

    n_classes: int  # C
    samples: int = 200  # M_c, virtual features per class: FL-bench; 2000 in Fed-CCVR
    epochs: int = 10  # over the virtual features: Fed-CCVR
    batch_size: int = 64  # Fed-CCVR
    server_lr: float = 0.001  # of SGD: Fed-CCVR
    momentum: float = 0.9  # Fed-CCVR

    def check(self, setting: Setting) -> None:
        if self.samples < 1 or self.epochs < 0 or self.batch_size < 1:
            raise RecipeError(
                f"ccvr: samples = {self.samples} must be at least 1, epochs = {self.epochs} at least 0, "
                f"batch_size = {self.batch_size} at least 1"
            )
        if not self.server_lr > 0 or not 0 <= self.momentum < 1:
            raise RecipeError(
                f"ccvr: server_lr = {self.server_lr} must be above 0, momentum = {self.momentum} in [0, 1)"
            )

    def exchanges(self, cohort: int) -> Exchanges:
        return Exchanges(finish=1 if self.epochs else 0)

    def answer(self, job: str, work: Work) -> Answer:
        """n_{c,k}, mu_{c,k}, and Sigma_{c,k} = 1/(n_{c,k} - 1) sum_j (z_j - mu_{c,k})(z_j - mu_{c,k})', z features."""
        own = work.data.own
        assert own is not None

        def features(batch: Batch) -> tuple[Tensor, Tensor]:
            z = work.task.forward(work.params, work.buffers, batch.x, train=False).features  # [B, d]
            is_class = one_hot(batch.y, self.n_classes, z.dtype)  # [B, C]
            return z, is_class if batch.mask is None else is_class * batch.mask.to(z.dtype)[:, None]

        def sums(batch: Batch) -> Tree:
            z, is_class = features(batch)
            return {"z": is_class.T @ z}

        def products(batch: Batch, mean: Tensor) -> Tree:
            z, is_class = features(batch)
            centred = (z - mean[batch.y]) * is_class.T[:, :, None]  # [C, B, d]
            return {"zz": centred.transpose(1, 2) @ centred}  # [C, d, d]

        total = own.mean(sums)["z"]
        n = own.class_counts(self.n_classes).to(total.dtype)  # [C]
        mean = total * (n.sum() / n.clamp(min=1))[:, None]  # [C, d]
        cov = own.mean(partial(products, mean=mean))["zz"] * (n.sum() / (n - 1).clamp(min=1))[:, None, None]
        i, j = torch.triu_indices(mean.shape[1], mean.shape[1], device=mean.device)
        return Answer({}, {}, {"mean": mean, "cov": cov[:, i, j], "n": n}, work.view.memory, {})

    def finish(self, server: Server, clients: tuple[int, ...], desk: Desk) -> Asks:
        """Statistics of everybody under the final model, virtual features, and the classifier that fits them."""
        if not self.epochs:
            return server
        replies: Reply = yield Ask(f"{self.name}.statistics", clients, server.params, server.buffers, {}, {})
        n, mean, cov = self.pooled(replies.upload[self.name])
        z, y = self.virtual(fold(desk.key, 0), n, mean, cov)
        return server._replace(params=self.calibrated(desk.task, server.params, z, y, fold(desk.key, 1)))

    @staticmethod
    def pooled(upload: Tree) -> tuple[Tensor, Tensor, Tensor]:
        """n_c [C], mu_c [C, d] and Sigma_c [C, d, d] of all clients' features together (section 4):

        n_c = sum_k n_{c,k}, mu_c = sum_k n_{c,k} mu_{c,k} / n_c, and Sigma_c = 1/(n_c - 1) sum_k
        [(n_{c,k} - 1) Sigma_{c,k} + n_{c,k} (mu_{c,k} - mu_c)(mu_{c,k} - mu_c)'], which the paper prints uncentred.
        """
        n_k, mean_k, cov_k = upload["n"], upload["mean"], upload["cov"]  # [M, C], [M, C, d], [M, C, d (d + 1) / 2]
        d = mean_k.shape[2]
        n = n_k.sum(0)
        mean = torch.einsum("mc,mcd->cd", n_k, mean_k) / n.clamp(min=1)[:, None]
        i, j = torch.triu_indices(d, d, device=n.device)
        place = torch.zeros(d, d, dtype=torch.int64, device=n.device)
        place = place.index_put((i, j), torch.arange(len(i), device=n.device))
        place = place + place.triu(1).T  # where the triangle has entry (i, j)
        within = torch.einsum("mc,mcp->cp", (n_k - 1).clamp(min=0), cov_k)[:, place]
        apart = mean_k - mean
        between = torch.einsum("mci,mcj->cij", n_k[:, :, None] * apart, apart)
        return n, mean, (within + between) / (n - 1).clamp(min=1)[:, None, None]

    def virtual(self, key: Tensor, n: Tensor, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """`samples` features z ~ N(mu_c, Sigma_c) of every class that somebody has, and their labels."""
        n_classes, d = mean.shape
        values, vectors = torch.linalg.eigh(cov.double())  # [C, d], [C, d, d]
        rounding = d * torch.finfo(cov.dtype).eps * values[:, -1:]
        scales = torch.where(values > rounding, values, torch.zeros_like(values)).sqrt()
        root = (vectors * scales[:, None, :]) @ vectors.transpose(1, 2)
        noise = normal(key, n_classes, self.samples, d, dtype=torch.float64)
        z = mean.double()[:, None, :] + noise @ root  # [C, samples, d]
        y = torch.arange(n_classes, device=n.device)[:, None].expand(n_classes, self.samples)
        return z[n > 0].flatten(0, 1).to(mean.dtype), y[n > 0].flatten()

    def calibrated(self, task: Task, params: Params, z: Tensor, y: Tensor, key: Tensor) -> Params:
        """SGD on the cross-entropy of the virtual features, from the trained classifier on; the encoder stays."""
        optimizer = SGD(self.server_lr, self.momentum)
        head = {name: params[name] for name in task.network.layers[-1].parameters}
        state = optimizer.init(head)

        def loss(w: Params, batch: Tensor) -> tuple[Tensor, Tree]:
            return cross_entropy(task.classify(params | w, z[batch]), y[batch], None), {}

        for epoch in range(self.epochs):
            order = permutation(fold(key, epoch), len(y))
            for batch in torch.split(order, self.batch_size):
                grads, _ = autograd(partial(loss, batch=batch), head)
                step, state = optimizer.step(grads, state, head)
                head = add(head, step)
        return params | head
