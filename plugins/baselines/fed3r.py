"""Fed3R.
Fanì, Camoriano, Caputo, Ciccone: Accelerating Heterogeneous Federated Learning with Closed-form
Classifiers, ICML 2024. https://arxiv.org/abs/2406.01116
The authors' code: https://github.com/Erosinho13/Fed3R

A ridge regression from features to one-hot labels, as the classifier. Before round 1, each client
sends once A_k = sum z z' and b_k = sum z y' over its samples: z are the features of w_0, with a 1
for the bias. The server solves (sum_k A_k + lambda I) W = sum_k b_k. Sums do not depend on who has
which sample. So W is that of all samples together, for each partition.
- Sums and the solution are float64. Two partitions of the same samples differ by the rounding of
  sums in another order. In float32, W has the same bits, but for few numbers' last bit where d is
  large. A client sends the upper triangle of A_k: (d + 1)(d + 2) / 2 + (d + 1) C numbers.
- The defaults are those of the authors' code: lambda, which acts on the bias too, and columns of W
  that are divided by their length, with their bias. With `normalise=False`, `temperature=1` and
  `penalise_bias=False` the classifier is scikit-learn's `Ridge(alpha=lam)`.
- `temperature`: W is divided by it. It changes no prediction. The authors' code divides the logits
  in fine-tuning, also where it takes the gradient. Here the classifier itself is larger.
- The authors draw clients in rounds, until each has sent its sums. Here all send them before round
  1, with the same bytes in total. A client that is absent then is not part of the solution.
- `fine_tune=False`: no client takes a local step, so the classifier is that of round 1 in every
  round; one round is enough, and its local_loss is 0. `fine_tune=True` (Fed3R+FT): the ridge
  classifier replaces that of w_0, and the rest of the recipe trains on. With `linear_probe` only
  the classifier is trained (the authors' FT_LP).
- Random features in place of a kernel (Fed3R-RF) are left out.

Features of a network that nobody trained are those of random weights: take data that are embedded
already, or first values by `init`.

Meeting others: without fine-tuning it stands alone. With it, others see training that begins at
another classifier. But what they remember begins with the drawn w_0: v_k of Ditto and APFL has its
classifier, and FedLESAM perturbs in round 1. CCVR and FedBABU own the classifier too. FedML pair:
`make_pair("fed3r")`.
"""

from __future__ import annotations

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
    Server,
    Setting,
)
from fedml_noniid.core.data import Batch, one_hot
from fedml_noniid.core.options import Positive
from fedml_noniid.core.sums import added
from fedml_noniid.core.task import Task
from fedml_noniid.core.trees import Params, Tree

SMALLEST_LENGTH = 1e-6  # of a column of W: that of a class that no client has is 0


@dataclass(frozen=True)
class Fed3R(Component):
    """Computes the classifier by ridge regression on the sums of all clients."""

    name: ClassVar[str] = "fed3r"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.CLASSIFIER})

    lam: Positive = 0.01  # lambda: the authors' configurations
    penalise_bias: bool = True  # the authors' code; False: lambda does not act on the bias
    normalise: bool = True  # the authors' code
    temperature: Positive = 0.1  # the authors' configurations of fine-tuning
    fine_tune: bool = False

    @property
    def needs(self) -> Needs:
        return Needs(
            local_set=True,
            features=True,
            classifier=True,
            classes=True,
            no_training=not self.fine_tune,
        )

    def exchanges(self, setting: Setting) -> Exchanges:
        return Exchanges(begin=1)

    def answer(self, client: Client) -> Answer:
        """A_k = sum_i z_i z_i', b_k = sum_i z_i y_i'; of A_k the upper triangle."""
        task = client.task

        def sums(batch: Batch) -> Tree:
            z = task.eval(client.params, client.buffers, batch.x).features.double()  # [B, d]
            if _bias(task):
                z = torch.cat([z, torch.ones_like(z[:, :1])], dim=1)  # [B, d + 1]
            y = one_hot(batch.y, task.network.n_classes, z.dtype)  # [B, C]
            kept = z if batch.mask is None else z * batch.mask.to(z.dtype)[:, None]
            return {"A": kept.T @ z, "b": kept.T @ y}

        total = client.local_set.total(sums)
        i, j = torch.triu_indices(*total["A"].shape, device=total["A"].device)
        return Answer({"A": total["A"][i, j], "b": total["b"]})

    def survey(self, server: Server) -> Asks:
        """Before round 1: W = (sum_k A_k + lambda I)^-1 sum_k b_k is the classifier of w_0."""
        if server.round > 0:
            return None
        replies = yield Ask("sums", server.cohort, server.params, server.buffers)
        a, b = (added(replies.upload[name]) for name in ("A", "b"))
        classifier = self._classifier(server.task, a, b)
        w = server.params
        return Change(params=w | {name: leaf.to(w[name]) for name, leaf in classifier.items()})

    def _classifier(self, task: Task, triangle: Tensor, b: Tensor) -> Params:
        """The parameters of the classifier from sum_k A_k, its upper triangle, and sum_k b_k."""
        d, names = task.network.feature_size, task.network.layers[-1].parameters
        i, j = torch.triu_indices(len(b), len(b), device=b.device)
        upper = b.new_zeros(len(b), len(b)).index_put((i, j), triangle)
        penalty = torch.full_like(upper[0], self.lam)
        if not self.penalise_bias:
            penalty[d:] = 0
        whole = upper + upper.triu(1).T
        matrix = whole + torch.diag(penalty)
        solution, singular = torch.linalg.solve_ex(matrix, b)  # [d, C], or [d + 1, C]
        if singular:  # without a penalty of the bias, if all vectors are 0
            solution = torch.linalg.pinv(matrix, hermitian=True) @ b
        if self.normalise:
            solution = solution / torch.linalg.vector_norm(solution[:d], dim=0).clamp(
                min=SMALLEST_LENGTH
            )
        solution = solution / self.temperature
        parts = {name: solution[d] if name == _bias(task) else solution[:d].T for name in names}
        return {name: leaf.contiguous() for name, leaf in parts.items()}


def _bias(task: Task) -> str:
    """The name of the classifier's bias; "" if it has none."""
    return next((name for name in task.network.layers[-1].parameters if name.endswith("bias")), "")
