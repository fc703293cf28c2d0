"""FedAvg with local fine-tuning, the control that personalised methods are compared with.
Compared for example in Collins, Hassani, Mokhtari, Shakkottai: Exploiting Shared Representations
for Personalized Federated Learning, ICML 2021, https://arxiv.org/abs/2102.07078.

Nothing changes in training: the global model has the bits of the recipe without it. Each client is
tested with the model as its last local training left it, which is the received model after a round
of local steps. It costs no step.
- So after round T a client's model is w_{T-1}, fine-tuned. It never sees the average of round T.
- A client that misses rounds is tested with an old model; one that never took part with the global
  one that it would receive.

Meeting others: the local steps are those of the whole recipe, so `scaffold+finetune` fine-tunes
with SCAFFOLD's steps. Its FedML pair is `make_pair("finetune")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedml_noniid.core.component import (
    V_BUFFERS,
    Answer,
    Client,
    Component,
    Exclusive,
    OwnModel,
    Trace,
)
from fedml_noniid.core.trees import Params, Tree, select


@dataclass(frozen=True)
class FineTune(Component):
    """Tests each client with its model after local training."""

    name: ClassVar[str] = "finetune"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.OWN_MODEL})

    def init_client(self, client: Client) -> Tree:
        """w_k of the last round with its running statistics, and whether there is one."""
        tuned = next(iter(client.params.values())).new_zeros(())
        return {"w_k": client.params, V_BUFFERS: client.buffers, "tuned": tuned}

    def own_model(self, v: Params, w: Params, client: Client) -> OwnModel:
        """w_k of the client's last round; w if there is none."""
        tuned, memory = client.memory["tuned"] > 0, client.memory
        buffers = select(tuned, memory[V_BUFFERS], client.buffers)
        return OwnModel(select(tuned, memory["w_k"], w), buffers=buffers)

    def report(self, trace: Trace, client: Client) -> Answer:
        return Answer(
            memory={
                "w_k": trace.params,
                V_BUFFERS: trace.buffers,
                "tuned": torch.ones_like(client.memory["tuned"]),
            }
        )
