"""FSL: the server learns too.
Mai, La, Zhang: Federated Learning with Server Learning: Enhancing Performance for Non-IID Data,
2022. https://arxiv.org/abs/2210.02614

After the average, the server trains the model on labelled data of its own, here the public split.
So it is the control for methods that train clients' models on that split (FNR-FL): the images and
the steps are the same, and nothing else of the method is there.
- The server takes whole epochs and the optimiser of local training, with an empty memory and the
  clients' step size.
- The images are taken as they are, also with `augment`.
- The running statistics of batch norms start from the clients' average and move to the public data.

Meeting others: the model after all methods' server steps is trained, without their terms.
FedML pair: `make_pair("fsl")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedml_noniid.core.component import Change, Component, Exclusive, Needs, Public, Server
from fedml_noniid.core.data import Batch, Pass, cross_entropy
from fedml_noniid.core.options import Count, CountOrNone
from fedml_noniid.core.randomness import fold
from fedml_noniid.core.task import Output
from fedml_noniid.core.training import Descent, Step, descend, gradient_of
from fedml_noniid.core.trees import Params


@dataclass(frozen=True)
class FSL(Component):
    """Trains the average on the labelled public split."""

    name: ClassVar[str] = "fsl"
    needs: ClassVar[Needs] = Needs(public=Public.LABELLED, whole_models=True, classes=True)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.SERVER_LEARNING})

    epochs: CountOrNone = 5  # over the public split, each round; ours
    batch_size: Count = 32  # ours

    def learn(self, server: Server) -> Change | None:
        """w <- w - eta dCE(f(x), y) / dw, for batches of the public split."""
        if not self.epochs:
            return None
        task, n = server.task, len(server.public.y)
        split = Pass(server.public, torch.arange(n, device=server.public.y.device))
        batches = split.shuffled(fold(server.key, "order"), self.epochs, self.batch_size)

        def loss(w: Params, buffers: Params, batch: Batch) -> tuple[Tensor, Output]:
            out = task.train(w, buffers, batch)
            return cross_entropy(out.logits, batch.y, None), out

        start = Descent(server.params, server.buffers)
        key = fold(server.key, "dropout")
        descent = descend(gradient_of(task, loss), start, batches, Step(task.optimizer), key)
        return Change(params=descent.params, buffers=descent.buffers)
