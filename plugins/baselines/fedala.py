"""FedALA: adaptive local aggregation.
Zhang, Hua, Wang, Song, Xue, Ma, Guan: FedALA: Adaptive Local Aggregation for Personalized Federated
Learning, AAAI 2023. https://arxiv.org/abs/2212.01197. The authors' code:
https://github.com/TsingZ0/FedALA; the same is in https://github.com/TsingZ0/PFLlib (`utils/ALA.py`)

Before it trains, a client mixes the received model Theta with its own last one, Theta_k, number by
number, in the `layers` nearest to the output: Theta_hat = Theta_k + (Theta - Theta_k) W. Below them
it takes Theta. It learns W in [0, 1] on a sample of its data, with Theta and Theta_k fixed. Then it
trains from Theta_hat, and sends the result as in FedAvg.
- W begins at 1, which is Theta, and is remembered. One pass over the sample in a round; in the
  start phase, the first time that a client learns W, passes until the standard deviation of the
  last `num_pre_loss` losses is below `threshold`.
- The start phase has at most `max_passes` passes, and is in the rounds up to `start_rounds` only: a
  client that begins later learns in one pass a round. Raise `start_rounds` where few clients take
  part in a round; all clients then take the time of `max_passes` passes in these rounds. The code
  sends the model to all clients in every round. Those that do not train mix it with theirs too, so
  every client's start phase is in round 2, without a limit of passes. With every client in every
  round it is in round 2 here too.
- The sample: every sample with probability `rate`, drawn anew in every round. The code takes a
  block of that size. A step of W has a batch of up to 500 samples; the code takes the batch of
  local training, so its eta belongs to smaller batches.
- `layers` counts weight layers, with their biases and batch norms; 0: all. The code counts tensors.
- While W is learned, the model is in eval mode.
- A client is tested with Theta_hat of the new global model, with the W that it learned before its
  last training; the authors learn W once more before they test. A client that never trained has the
  global model.

Meeting others: local training starts at Theta_hat. What corrects a client's drift from the received
model is refused (SCAFFOLD, FedNova, FedDyn, FedDC, FedCM), and other models of a client's own.
FedML pair: `make_pair("fedala")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedml_noniid.core.component import (
    START,
    Answer,
    Client,
    Component,
    Exclusive,
    Needs,
    OwnModel,
    Trace,
)
from fedml_noniid.core.data import Batch
from fedml_noniid.core.options import Count, CountOrNone, NonNegative, Share
from fedml_noniid.core.randomness import fold, uniform
from fedml_noniid.core.trees import Params, Tree, select, tree_map


@dataclass(frozen=True)
class FedALA(Component):
    """Starts each client from a learned mixture of the received model and its own last one."""

    name: ClassVar[str] = "fedala"
    needs: ClassVar[Needs] = Needs(local_set=True, features=True)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.OWN_MODEL, Exclusive.START})

    eta: NonNegative = 1.0
    rate: Share = 0.8  # s, of the local data
    layers: CountOrNone = 1  # p, from the output
    threshold: NonNegative = 0.1
    num_pre_loss: Count = 10
    max_passes: Count = 20
    start_rounds: Count = 2

    def init_client(self, client: Client) -> Tree:
        """Theta_k, the last model, and W, its weights: 1; whether Theta_k is trained, W learned."""
        flag = next(iter(client.params.values())).new_zeros(())
        names = self._mixed(client)
        ones = {name: torch.ones_like(client.params[name]) for name in names}
        return {"theta": client.params, "W": ones, "trained": flag, "learned": flag.clone()}

    def prepare(self, client: Client) -> Tree:
        """W <- clip(W - eta grad_W L(Theta_hat), 0, 1), batch by batch; and Theta_hat."""
        memory = client.memory
        mix: Params = memory["W"]
        trained = going = memory["trained"] > 0  # else there is no model of its own to mix with
        loss, losses = torch.zeros_like(memory["trained"]), []
        for number in range(self.max_passes if client.round <= self.start_rounds else 1):
            if number == 1:  # only the start phase has more passes
                going = going & (memory["learned"] == 0)
            for i, batch in enumerate(client.local_set):
                mix, loss = self._step(mix, loss, batch, fold(client.key, i), client, going)
            losses.append(loss)
            if len(losses) > self.num_pre_loss:
                spread = torch.stack(losses[-self.num_pre_loss :]).std(correction=0)
                going = going & (spread >= self.threshold)
        start = select(trained, self._aggregated(mix, client.params, client), client.params)
        return {"W": mix, "start": start}

    def warm_start(self, client: Client) -> Tree:
        """Local training starts at Theta_hat."""
        return {START: client.prepared["start"]}

    def report(self, trace: Trace, client: Client) -> Answer:
        memory = client.memory
        trained = torch.ones_like(memory["trained"])
        kept = {"theta": trace.params, "W": client.prepared["W"], "trained": trained}
        return Answer(memory=kept | {"learned": memory["trained"]})

    def own_model(self, v: Params, w: Params, client: Client) -> OwnModel:
        """Theta_hat of the model w."""
        trained = client.memory["trained"] > 0
        return OwnModel(select(trained, self._aggregated(client.memory["W"], w, client), w))

    def _mixed(self, client: Client) -> list[str]:
        """The parameters of the layers that are mixed."""
        layers = [
            [name for name in layer.parameters if name in client.params]
            for layer in client.task.network.layers
        ]
        trained = [names for names in layers if names]
        return [name for names in trained[-self.layers :] for name in names]

    def _aggregated(self, mix: Params, w: Params, client: Client) -> Params:
        """Theta_hat = Theta_k + (Theta - Theta_k) W in the layers of W; Theta below them."""
        theta = client.memory["theta"]
        return w | {
            name: theta[name] + (w[name] - theta[name]) * weight for name, weight in mix.items()
        }

    def _step(
        self, mix: Params, last: Tensor, batch: Batch, key: Tensor, client: Client, going: Tensor
    ) -> tuple[Params, Tensor]:
        """(W after a step on the sample of a batch, its loss); both as before if the sample is
        empty, and W if the client is not `going`."""
        task = client.task
        mask = uniform(key, len(batch.y)) < self.rate
        mask = mask if batch.mask is None else mask & batch.mask

        def loss(mix: Params) -> tuple[Tensor, Tree]:
            model = self._aggregated(mix, client.params, client)
            value = task.loss.mean(task.eval(model, client.buffers, batch.x).logits, batch.y, mask)
            return value, {"loss": value}

        grads, left = task.grad(loss, mix)
        stepped = tree_map(lambda weight, g: (weight - self.eta * g).clamp(0, 1), mix, grads)
        return select(going, stepped, mix), torch.where(mask.any(), left["loss"], last)
