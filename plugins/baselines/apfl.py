"""APFL: adaptive personalized federated learning.
Deng, Kamani, Mahdavi: Adaptive Personalized Federated Learning, 2020.
https://arxiv.org/abs/2003.13461. The authors' code: https://github.com/MLOPTPSU/FedTorch

Each client is tested with the mixture alpha v_k + (1 - alpha) w of a model of its own and the
global one. w trains as in FedAvg, to the bit. In every step v_k descends the loss of the mixture,
with w as it is before that step.
- The gradient of v_k is alpha times that of the mixture. The authors' code mixes with w after its
  step; here both take their step at the same time, as in the paper.
- `adaptive`: alpha descends the loss of the mixture too, in each step and with the step size of
  the weights: alpha <- alpha - eta <v_k - w, g>. Between rounds it is put back into [0, 1]; within
  a round the mixture takes it clipped. The authors' code moves alpha in the first step of a round
  only, and adds 0.02 alpha to its gradient. Weight decay and momentum act on alpha as on weights.
- v_k begins as w_0. alpha = 0 tests the global parameters; with alpha = 1, v_k is trained alone.
- v_k has the running statistics of the mixture's batch norms.

Meeting others: they act on w only. FedML pair: `make_pair("apfl")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedml_noniid.core.component import (
    V_BUFFERS,
    Answer,
    Client,
    Component,
    Exclusive,
    OwnModel,
    Trace,
    V,
)
from fedml_noniid.core.options import Fraction
from fedml_noniid.core.trees import Params, Tree

ALPHA = "apfl.alpha"  # among the parameters of v_k, if it is trained


@dataclass(frozen=True)
class APFL(Component):
    """Mixes a model of the client's own with the global one."""

    name: ClassVar[str] = "apfl"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.OWN_MODEL})

    alpha: Fraction = 0.5  # the first one if it is adaptive
    adaptive: bool = False

    def init_client(self, client: Client) -> Tree:
        """v_k = w_0 with its running statistics; with `adaptive` also alpha."""
        some = next(iter(client.params.values()))
        alpha = {ALPHA: some.new_tensor(self.alpha)} if self.adaptive else {}
        return {V: client.params | alpha, V_BUFFERS: client.buffers}

    def own_model(self, v: Params, w: Params, client: Client) -> OwnModel:
        """alpha v_k + (1 - alpha) w."""
        alpha = _clipped(v[ALPHA]) if self.adaptive else self.alpha
        return OwnModel({name: alpha * v[name] + (1 - alpha) * leaf for name, leaf in w.items()})

    def report(self, trace: Trace, client: Client) -> Answer:
        """alpha in [0, 1], from which the next round goes on."""
        if not self.adaptive:
            return Answer()
        v = client.memory[V]
        return Answer(memory={V: v | {ALPHA: v[ALPHA].clamp(0, 1)}})


def _clipped(alpha: Tensor) -> Tensor:
    """alpha in [0, 1], with the gradient of alpha: at an end it can come back."""
    return alpha + (alpha.clamp(0, 1) - alpha).detach()
