"""MOON: model-contrastive federated learning.
Li, He, Song: Model-Contrastive Federated Learning, CVPR 2021. https://arxiv.org/abs/2103.16257. The
authors' code: https://github.com/QinbinLi/MOON

Algorithm 1 with eqs. 3 and 5: loss = CE + mu l_con. l_con pulls a sample's representation z towards
that of the received model, and pushes it away from that of the client's previous local model.
- z is the input of the classifier in every model. The default has no projection head, as FNR-FL
  counts: its traffic for MOON is 2M. The authors' head is an option of the model (`model_options:
  {projection: 256}`), so all methods of a table share it, as they do in the authors' code.
- z of the two old models is computed in eval mode and has no gradient. z of the local model is from
  the training pass. Both are as in the authors' code.
- There is one previous model (the authors' model buffer size 1): the client's own after its last
  local training, with its buffers. At the first participation it is w_0. If the received model is
  w_0 too, l_con is log 2 and has no gradient.
- The cosine with a zero vector is 0.
- The authors run MOON with a local momentum of 0.9 and their other methods without. Here all take
  train.momentum.

Meeting others: z comes from the network, before other methods change the logits. With FNR-FL the
previous model is the one after local training, before the refinement. Its FedML pair is
`make_pair("moon")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedml_noniid.core.component import Answer, Client, Component, Needs, Trace
from fedml_noniid.core.data import Batch
from fedml_noniid.core.options import NonNegative, Positive
from fedml_noniid.core.task import Output
from fedml_noniid.core.trees import Params, Tree


@dataclass(frozen=True)
class MOON(Component):
    """Contrasts each representation with those of the received model and of the client's previous
    one."""

    name: ClassVar[str] = "moon"
    needs: ClassVar[Needs] = Needs(features=True)

    mu: NonNegative = 1.0  # the authors' code; section 4.1 tunes it over 0.1, 1, 5, 10
    tau: Positive = 0.5  # section 4.1

    def init_client(self, client: Client) -> Tree:
        """The model of z_prev: w_0 with its running statistics."""
        return {"w": client.params, "buffers": client.buffers}

    def penalty(self, w: Params, out: Output, batch: Batch, client: Client) -> Tensor | None:
        """mu l_con, eq. 3: l_con = -log(e^(sim(z, z_glob)/tau) / (e^(sim(z, z_glob)/tau) +
        e^(sim(z, z_prev)/tau)))."""
        if not self.mu:
            return None
        z_glob = client.task.eval(
            client.params, client.buffers, batch.x
        ).features.detach()  # [B, d]
        z_prev = client.task.eval(
            client.memory["w"], client.memory["buffers"], batch.x
        ).features.detach()
        positive, negative = _cosine(out.features, z_glob), _cosine(out.features, z_prev)  # [B]
        return self.mu * batch.mean(-F.logsigmoid((positive - negative) / self.tau))

    def report(self, trace: Trace, client: Client) -> Answer:
        """The local model gives the next z_prev."""
        return Answer(memory={"w": trace.params, "buffers": trace.buffers})


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of the rows, [B, d] -> [B]; 0 with a finite gradient if a row is zero."""
    return (_unit(a) * _unit(b)).sum(1)


def _unit(rows: Tensor) -> Tensor:
    square = rows.square().sum(1, keepdim=True)
    # The root has no slope at zero, so zero is replaced before the root and not only in the
    # quotient.
    return rows / torch.where(square > 0, square, torch.ones_like(square)).sqrt()
