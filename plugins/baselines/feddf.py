"""FedDF.
Lin, Kong, Stich, Jaggi: Ensemble Distillation for Robust Model Fusion in Federated Learning,
NeurIPS 2020. https://arxiv.org/abs/2006.07242. The authors' code:
https://github.com/epfml/federated-learning-public-code

Algorithm 1. The server starts from the average of the clients' models. It distils the mean of the
clients' logits (AVGLOGITS) into this model on unlabelled data, here the public split without its
labels.
- The number of steps is fixed. The authors take up to 10,000 steps and stop after 1,000 to 2,000
  without progress on a labelled validation set. The server has no labels here.
- The teachers answer in eval mode, once for the whole split. The student is in train mode, as in
  the authors' code. The running statistics of its batch norms start from the clients' average and
  move to the public data.
- As in the authors' code, the loss has no factor T^2 and the gradient is clipped.
- The batches come from epochs over the split, each in a new order. The last batch of an epoch may
  be short.

Meeting others: the teachers are the models that enter the average (FNR-FL: the refined ones). The
student is the model after all methods' server steps. Its FedML pair is `make_pair("feddf")`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedml_noniid.core.component import Change, Component, Exclusive, Needs, Public, Replies, Server
from fedml_noniid.core.data import Batch, Pass, Samples
from fedml_noniid.core.optimizers import Adam
from fedml_noniid.core.options import Count, CountOrNone, Positive
from fedml_noniid.core.randomness import fold
from fedml_noniid.core.task import Output
from fedml_noniid.core.training import Descent, Step, descend, gradient_of
from fedml_noniid.core.trees import Params

PASS_BATCH = 500  # samples per batch of the teachers' pass


@dataclass(frozen=True)
class FedDF(Component):
    """Distils the ensemble of the clients into their average."""

    name: ClassVar[str] = "feddf"
    needs: ClassVar[Needs] = Needs(
        public=Public.UNLABELLED, whole_models=True, classes=True, replies=Replies.MODELS
    )
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.SERVER_LEARNING})

    steps: CountOrNone = 500  # ours; authors' code: up to 10,000, see above
    batch_size: Count = 128  # authors' code
    server_lr: Positive = 1e-3  # of Adam, falling to 0 along a cosine: authors' code
    T: Positive = 1.0  # temperature: authors' code
    clip: Positive = 5.0  # largest norm of the gradient: authors' code

    def learn(self, server: Server) -> Change | None:
        """Algorithm 1, lines 8-10: x <- x - eta_s dKL(softmax(mean_k f(x_k) / T) || softmax(f(x) /
        T)) / dx."""
        if not self.steps:
            return None
        x, task, n = server.public.x, server.task, len(server.public.y)
        target = torch.softmax(self.mean_logits(server) / self.T, dim=1)  # [n, C]
        epochs = math.ceil(self.steps / math.ceil(n / self.batch_size))
        split = Pass(Samples(x, target), torch.arange(n, device=x.device))
        batches = split.shuffled(fold(server.key, "order"), epochs, self.batch_size)

        def divergence(w: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Output]:
            out = task.train(w, buffers, batch)
            return F.kl_div(
                F.log_softmax(out.logits / self.T, dim=1), batch.y, reduction="batchmean"
            ), out

        adam = Adam(self.server_lr, clip=self.clip)
        descent = descend(
            gradient_of(task, divergence),
            Descent(server.params, server.buffers),
            islice(batches, self.steps),
            Step(adam, rate=lambda s: (1 + math.cos(math.pi * s / self.steps)) / 2),
            fold(server.key, "dropout"),
        )
        return Change(params=descent.params, buffers=descent.buffers)

    @staticmethod
    def mean_logits(server: Server) -> Tensor:
        """1/M sum_k f(x_k) on the public split, [n, C]; one client's model is in memory at a
        time."""
        parts = torch.split(server.public.x, PASS_BATCH)
        logits = (
            torch.cat([server.task.eval(*model, part).logits for part in parts])
            for model in server.client_models()
        )
        return reduce(torch.add, logits) / len(server.replies.clients)
