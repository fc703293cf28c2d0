"""FedAdagrad, FedAdam, FedYogi.
Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated Optimization,
ICLR 2021. https://arxiv.org/abs/2003.00295

Algorithm 2, without bias correction as there. Choices:
- v starts at tau^2, the smallest value that the algorithm allows.
- The weights are n_k / sum n, as in the authors' experiments. `weights="uniform"`: 1/M, as
  algorithm 2 prints it.
- The paper tunes `server_lr` (eta) and `tau` for each task. The defaults here are none of its
  results: tune them.

Running statistics of batch norms are averaged as in FedAvg. FedML pairs: `make_pair("fedadam")` and
so on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedml_noniid.core.component import Change, Component, Exclusive, Server, Weights
from fedml_noniid.core.options import Momentum, Positive
from fedml_noniid.core.trees import Tree, tree_map, zeros_like


@dataclass(frozen=True)
class FedAdagrad(Component):
    """Divides the server's step by the root of the sum of all squared updates."""

    name: ClassVar[str] = "fedadagrad"
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.SERVER_STEP})

    server_lr: Positive = 0.03  # eta
    tau: Positive = 1e-3  # the degree of adaptivity
    beta1: Momentum = 0.0  # the paper's for FedAdagrad
    weights: Weights = "size"

    def init_server(self, server: Server) -> Tree:
        """m = 0, v = tau^2."""
        zero = zeros_like(server.params)
        return {"m": zero, "v": tree_map(lambda leaf: leaf + self.tau**2, zero)}

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Line 13: v = v + Delta^2."""
        return v + square

    def step(self, server: Server) -> Change:
        """Lines 11 to 16: m = beta1 m + (1 - beta1) Delta; x = x + eta m / (sqrt(v) + tau)."""
        state, update = server.state, server.update
        m = tree_map(lambda m, delta: self.beta1 * m + (1 - self.beta1) * delta, state["m"], update)
        v = tree_map(lambda v, delta: self.second(v, delta.square()), state["v"], update)
        moved = tree_map(
            lambda x, m, v: x + self.server_lr * m / (v.sqrt() + self.tau), server.params, m, v
        )
        return Change({"m": m, "v": v}, moved)


@dataclass(frozen=True)
class FedAdam(FedAdagrad):
    """Divides it by the root of a moving average of squared updates."""

    name: ClassVar[str] = "fedadam"

    beta1: Momentum = 0.9
    beta2: Momentum = 0.99

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Line 15: v = beta2 v + (1 - beta2) Delta^2."""
        return self.beta2 * v + (1 - self.beta2) * square


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """As FedAdam, with a moving average that changes by at most the squared update."""

    name: ClassVar[str] = "fedyogi"

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """Line 14: v = v - (1 - beta2) Delta^2 sign(v - Delta^2)."""
        return v - (1 - self.beta2) * square * (v - square).sign()
