"""Ditto.
Li, Hu, Beirami, Smith: Ditto: Fair and Robust Federated Learning Through Personalization, ICML
2021. https://arxiv.org/abs/2012.04221. The authors' code: https://github.com/litian96/ditto

The global model w trains as in FedAvg, to the bit. Beside it each client trains a personal model
v_k, which stays with it and with which it is tested: the loss of its own data, and a pull towards
the received model. Small lambda: local models. Large lambda: the global one.
- Each step of w has one step of v_k, on the same batch and with the same step size, as in the
  authors' code (`trainers_MTL/ditto.py`). A round then has as many steps for both.
- v_k begins as w_0. A client that never took part is tested with that.
- The authors choose lambda in each step on validation data if `dynamic_lam` is on. Here lambda is
  fixed.
- v_k has batch norms' running statistics of its own, and the optimiser's memory of v_k is empty at
  the start of a round.

Meeting others: they act on w only, and lambda pulls towards whatever the server sends. So Ditto
composes with every solver of the global model, such as SCAFFOLD. Its FedML pair is
`make_pair("ditto")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedml_noniid.core.component import V_BUFFERS, Client, Component, Exclusive, OwnModel, V
from fedml_noniid.core.options import NonNegative
from fedml_noniid.core.trees import Params, Tree


@dataclass(frozen=True)
class Ditto(Component):
    """Trains a personal model beside the global one, which pulls at it."""

    name: ClassVar[str] = "ditto"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.OWN_MODEL})

    lam: NonNegative = 1.0  # the middle of the authors' candidates 0.1, 1 and 2

    def init_client(self, client: Client) -> Tree:
        """v_k = w_0 with its running statistics."""
        return {V: client.params, V_BUFFERS: client.buffers}

    def own_model(self, v: Params, w: Params, client: Client) -> OwnModel:
        """h_k(v; w^t) = F_k(v) + lambda / 2 ||v - w^t||^2."""
        squares = [(v[name] - leaf).square().sum() for name, leaf in client.params.items()]
        return OwnModel(v, self.lam / 2 * torch.stack(squares).sum())
