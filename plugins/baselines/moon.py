"""MOON: model-contrastive federated learning. Li, He, Song: Model-Contrastive Federated Learning, CVPR 2021.
https://arxiv.org/abs/2103.16257. The authors' code: https://github.com/QinbinLi/MOON

Algorithm 1 with eqs. 3 and 5: loss = CE + mu l_con, where l_con pulls a sample's representation towards that of the
received model and pushes it away from that of the client's previous local model.
- z is the input of the classifier, whatever the model is. The default has no projection head (`moon_head=none`), which
  is what FNR-FL counts: its traffic for MOON is 2M. The authors' head is an option of the model (`model_options:
  {projection: 256}`), so that all methods of a table share it, as they do in the authors' code.
- z of the two old models is computed in eval mode and has no gradient, that of the local model is from the training
  pass; as in the authors' code.
- One previous model (the authors' model buffer size 1), that after the client's last local training, with its buffers.
  At the first participation it is w_0; where that is also the received model, l_con is log 2 without a gradient.
- The cosine with a zero vector is 0.
- The authors run MOON with a local momentum of 0.9 and their other methods without; here train.momentum is everybody's.

Meeting others: z is as the network gives it, before other methods change the logits. With FNR-FL the previous model is
that after local training, before the refinement. Its FedML pair is `make_pair("moon")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from plugins.core.component import Batch, Component, Data, RecipeError, Setting, Trace, View
from plugins.core.task import Output, Task, masked_mean
from plugins.core.trees import Params, Tree


@dataclass(frozen=True)
class MOON(Component):
    """Contrasts each representation with the received model's and the client's previous model's."""

    name: ClassVar[str] = "moon"

    mu: float = 1.0  # the authors' code; section 4.1 tunes it over 0.1, 1, 5, 10
    tau: float = 0.5  # section 4.1

    def check(self, setting: Setting) -> None:
        if not self.mu >= 0:
            raise RecipeError(f"moon: mu = {self.mu} must be at least 0")
        if not self.tau > 0:
            raise RecipeError(f"moon: tau = {self.tau} must be above 0")

    def init_client(self, params: Params, buffers: Params, task: Task) -> Tree:
        return {"w": params, "buffers": buffers}

    def penalty(self, task: Task, params: Params, out: Output, batch: Batch, view: View) -> Tensor | None:
        """mu l_con, eq. 3: l_con = -log(e^(sim(z, z_glob)/tau) / (e^(sim(z, z_glob)/tau) + e^(sim(z, z_prev)/tau)))."""
        if not self.mu:
            return None
        z_glob = task.forward(view.start, view.buffers, batch.x, train=False).features.detach()  # [B, d]
        z_prev = task.forward(view.memory["w"], view.memory["buffers"], batch.x, train=False).features.detach()
        positive, negative = _cosine(out.features, z_glob), _cosine(out.features, z_prev)  # [B]
        return self.mu * masked_mean(-F.logsigmoid((positive - negative) / self.tau), batch.mask)

    def report(self, task: Task, trace: Trace, view: View, data: Data) -> tuple[Tree, Tree]:
        """The next z_prev is that of the local model."""
        return {}, {"w": trace.end, "buffers": trace.buffers}


def _cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of the rows, [B, d] -> [B]; 0, with a gradient that is finite, where one is zero."""
    return (_unit(a) * _unit(b)).sum(1)


def _unit(rows: Tensor) -> Tensor:
    square = rows.square().sum(1, keepdim=True)
    # The root of a zero has no slope, so zero is kept out of the root and not only out of the quotient.
    return rows / torch.where(square > 0, square, torch.ones_like(square)).sqrt()
