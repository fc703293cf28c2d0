"""CCVR.
Luo, Chen, Hu, Zhang, Liang, Feng: No Fear of Heterogeneity: Classifier Calibration for Federated
Learning with Non-IID Data, NeurIPS 2021. https://arxiv.org/abs/2106.05001

Section 4. After the last round every client sends the mean and the covariance of its features, and
its count, for each class. The server pools them, draws virtual features from the Gaussians, and
trains the classifier further on these.
- The covariance is unbiased (n - 1). The pooled one is exactly that of all clients' features
  together. A client sends the upper triangle: C (d + d (d + 1) / 2 + 1) floats in all, once. A
  class of fewer than two samples has covariance 0.
- A draw is mu + Sigma^(1/2) z with the symmetric root, computed from eigenvalues. Eigenvalues below
  rounding are taken as 0. Cholesky fails where Sigma is singular (fewer samples than d, neurons
  that are never active), and a jitter would add noise there. The symmetric root does not depend on
  the eigenvectors' signs or order.
- Features behind a ReLU are never negative, but draws may be. As in the paper, nothing is clipped.
- We found no code of the authors. The numbers of the training are those of
  https://github.com/smduan/Fed-CCVR.

Meeting others: the evaluated model is calibrated. FedBABU freezes the classifier, so FedBABU is
refused. Its FedML pair is `make_pair("ccvr")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
    Replies,
    Server,
    Setting,
)
from fedml_noniid.core.data import Batch, Pass, Samples, cross_entropies, one_hot
from fedml_noniid.core.optimizers import SGD
from fedml_noniid.core.options import Count, CountOrNone, Momentum, Positive, Range
from fedml_noniid.core.randomness import fold, normal
from fedml_noniid.core.sums import added
from fedml_noniid.core.training import Descent, Step, descend, gradient_of
from fedml_noniid.core.trees import Params, Tree


@dataclass(frozen=True)
class CCVR(Component):
    """Trains the classifier on features drawn from the pooled Gaussian of every class."""

    name: ClassVar[str] = "ccvr"
    needs: ClassVar[Needs] = Needs(
        local_set=True, features=True, classifier=True, classes=True, replies=Replies.SCALARS
    )
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.CLASSIFIER})
    ranges: ClassVar[Mapping[str, Range]] = {"n": Range(0, whole=True)}

    samples: Count = 200  # M_c, virtual features per class: FL-bench; 2000 in Fed-CCVR
    epochs: CountOrNone = 10  # over the virtual features: Fed-CCVR
    batch_size: Count = 64  # Fed-CCVR
    server_lr: Positive = 0.001  # of SGD: Fed-CCVR
    momentum: Momentum = 0.9  # Fed-CCVR

    def exchanges(self, setting: Setting) -> Exchanges:
        return Exchanges(finish=1 if self.epochs else 0)

    def answer(self, client: Client) -> Answer:
        """n_{c,k}, mu_{c,k}, and Sigma_{c,k} = 1/(n_{c,k} - 1) sum_j (z_j - mu_{c,k})(z_j -
        mu_{c,k})', z features."""

        def features(batch: Batch) -> tuple[Tensor, Tensor]:
            z = client.task.eval(client.params, client.buffers, batch.x).features  # [B, d]
            is_class = one_hot(batch.y, client.task.network.n_classes, z.dtype)  # [B, C]
            return z, is_class if batch.mask is None else is_class * batch.mask.to(z.dtype)[:, None]

        def sums(batch: Batch) -> Tree:
            z, is_class = features(batch)
            return {"n": is_class.sum(0), "z": is_class.T @ z}

        total = client.local_set.total(sums)
        n = total["n"]  # [C]
        mean = total["z"] / n.clamp(min=1)[:, None]  # [C, d]

        def products(batch: Batch) -> Tree:
            z, is_class = features(batch)
            centred = (z - mean[batch.y]) * is_class.T[:, :, None]  # [C, B, d]
            return {"zz": centred.transpose(1, 2) @ centred}  # [C, d, d]

        cov = client.local_set.total(products)["zz"] / (n - 1).clamp(min=1)[:, None, None]
        i, j = torch.triu_indices(*cov.shape[1:], device=cov.device)
        return Answer({"mean": mean, "cov": cov[:, i, j], "n": n})

    def finish(self, server: Server) -> Asks:
        """Statistics of everybody under the final model, virtual features, and the classifier that
        fits them."""
        if not self.epochs:
            return None
        replies = yield Ask("statistics", server.cohort, server.params, server.buffers)
        z, y = self.virtual(fold(server.key, "noise"), *self.pooled(replies.upload))
        return Change(params=self.calibrated(server, z, y))

    @staticmethod
    def pooled(upload: Tree) -> tuple[Tensor, Tensor, Tensor]:
        """n_c [C], mu_c [C, d] and Sigma_c [C, d, d] of all clients' features together (section 4):

        n_c = sum_k n_{c,k}, mu_c = sum_k n_{c,k} mu_{c,k} / n_c, and Sigma_c = 1/(n_c - 1) sum_k
        [(n_{c,k} - 1) Sigma_{c,k} + n_{c,k} (mu_{c,k} - mu_c)(mu_{c,k} - mu_c)']. The paper prints
        it uncentred.
        """
        n_k, mean_k, cov_k = (
            upload["n"],
            upload["mean"],
            upload["cov"],
        )  # [M, C], [M, C, d], [M, C, d (d + 1) / 2]
        d = mean_k.shape[2]
        n = added(n_k)
        mean = added(n_k[:, :, None] * mean_k) / n.clamp(min=1)[:, None]
        i, j = torch.triu_indices(d, d, device=n.device)
        entry = torch.zeros(d, d, dtype=torch.int64, device=n.device)
        entry = entry.index_put((i, j), torch.arange(len(i), device=n.device))
        entry = entry + entry.triu(1).T  # where the triangle has entry (i, j)
        within = added((n_k - 1).clamp(min=0)[:, :, None] * cov_k)[:, entry]
        apart = mean_k - mean
        between = torch.einsum("mci,mcj->cij", n_k[:, :, None] * apart, apart)
        return n, mean, (within + between) / (n - 1).clamp(min=1)[:, None, None]

    def virtual(self, key: Tensor, n: Tensor, mean: Tensor, cov: Tensor) -> tuple[Tensor, Tensor]:
        """`samples` features z ~ N(mu_c, Sigma_c) of every class that a client has, and their
        labels."""
        n_classes, d = mean.shape
        values, vectors = torch.linalg.eigh(cov.double())  # [C, d], [C, d, d]
        rounding = d * torch.finfo(cov.dtype).eps * values[:, -1:]
        scales = torch.where(values > rounding, values, torch.zeros_like(values)).sqrt()
        root = (vectors * scales[:, None, :]) @ vectors.transpose(1, 2)
        noise = normal(key, n_classes, self.samples, d, dtype=torch.float64)
        z = mean.double()[:, None, :] + noise @ root  # [C, samples, d]
        y = torch.arange(n_classes, device=n.device)[:, None].expand(n_classes, self.samples)
        labels = [label for label, count in enumerate(n.tolist()) if count > 0]
        return z[labels].flatten(0, 1).to(mean.dtype), y[labels].flatten()

    def calibrated(self, server: Server, z: Tensor, y: Tensor) -> Params:
        """SGD on the cross-entropy of the virtual features.

        Starts at the trained classifier; the encoder stays.
        """

        def loss(w: Params, buffers: Params, batch: Batch) -> tuple[Tensor, None]:
            return batch.mean(
                cross_entropies(server.task.classify(server.params | w, batch.x), batch.y)
            ), None

        head = {name: server.params[name] for name in server.task.network.layers[-1].parameters}
        features = Pass(Samples(z, y), torch.arange(len(y), device=y.device))
        batches = features.shuffled(fold(server.key, "order"), self.epochs, self.batch_size)
        step = Step(SGD(self.server_lr, self.momentum))
        gradient = gradient_of(server.task, loss)
        return server.params | descend(gradient, Descent(head), batches, step).params
