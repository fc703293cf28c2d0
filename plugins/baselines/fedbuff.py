"""FedBuff.
Nguyen, Malik, Zhan, Yousefpour, Rabbat, Malek, Huba: Federated Learning with Buffered Asynchronous
Aggregation, AISTATS 2022. https://arxiv.org/abs/2106.06639

Algorithm 1: a client trains from the model v_k = w^{t - tau_k} that it received tau_k server steps
ago, and sends Delta_k = w_k - v_k. At the K-th answer the server steps:

    w^{t+1} = w^t + server_lr (1/K) sum_k s(tau_k) Delta_k,   s(tau) = (1 + tau)^(-exponent)

It divides by K, as the paper: old answers shorten the step. FedScale divides by sum_k s(tau_k),
FLSim may do either. The paper has s(tau) = 1 / sqrt(1 + tau); `exponent` 0 is its form without
scaling. Clients weigh alike; with `weights: size` an answer counts by n_k / sum n in place of 1/K.
Running statistics are the mean over the buffer, weighted by s.

Who answers when is the schedule of a scenario with `waits: {buffer: K, concurrency: ...}`
(`engines/schedule.py`). Without a clock tau is 0 for all, and the method is FedAvg.

Meeting others: a client sees v_k as the received model, so FedProx pulls to it. The server's steps
(FedAvgM, FedAdam) act on the mean above. Methods that send state of the present round, ask clients
again or read their models are refused. It has no FedML pair: a deployment waits for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedml_noniid.core.component import (
    MODEL_OF,
    MODELS,
    Change,
    Component,
    Exclusive,
    Needs,
    Server,
    Setting,
    Weights,
)
from fedml_noniid.core.options import NonNegative, Positive, RecipeError
from fedml_noniid.core.sums import weighted_mean
from fedml_noniid.core.trees import Params, Tree, scale, tree_map


@dataclass(frozen=True)
class FedBuff(Component):
    """Steps at every K-th answer, also of clients that have an older model."""

    name: ClassVar[str] = "fedbuff"
    needs: ClassVar[Needs] = Needs(stale=True)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset({Exclusive.AVERAGE, Exclusive.RECEIVED})

    server_lr: Positive = 1.0  # eta_g
    exponent: NonNegative = 0.5
    weights: Weights = "uniform"

    def check(self, setting: Setting) -> None:
        if setting.deployed:
            raise RecipeError(f"{self.name!r} is for simulations: a deployment waits for all")

    def init_server(self, server: Server) -> Tree:
        """A ring of w_0, as long as the oldest model of the run is behind."""
        # Without a clock two: a stand-in for a device's number is 1 (`benchmarks/fake_gpu.py`).
        slots = 1 + max(server.staleness, default=1)
        model = {"params": server.params, "buffers": server.buffers}
        ring = tree_map(lambda leaf: leaf.expand(slots, *leaf.shape).clone(), model)
        zeros = torch.zeros(server.n_clients, dtype=torch.int64, device=server.keys.device)
        return {MODELS: ring, MODEL_OF: zeros}

    def assign(self, server: Server) -> Change:
        """w^t takes the place of the oldest model; client k has w^{t - tau_k}."""
        model_of, t = server.state[MODEL_OF].clone(), server.round - 1
        slots = len(next(iter(server.state[MODELS]["params"].values())))
        behind = server.staleness or (0,) * len(server.cohort)
        at = [(t - tau) % slots for tau in behind]
        model_of[list(server.cohort)] = model_of.new_tensor(at)
        new = {"params": server.params, "buffers": server.buffers}
        here = model_of.new_tensor([t % slots])
        ring = tree_map(
            lambda old, leaf: old.index_copy(0, here, leaf.unsqueeze(0)), server.state[MODELS], new
        )
        return Change({MODELS: ring, MODEL_OF: model_of})

    def weigh(self, server: Server) -> Tensor | None:
        """s(tau_k); nothing where all are the same."""
        scales = self.scales(server)
        factors = torch.tensor(scales, dtype=torch.float64, device=server.keys.device)
        return None if len({*scales}) == 1 else factors

    def scales(self, server: Server) -> list[float]:
        """s(tau_k) of the clients that answered."""
        tau = dict(zip(server.cohort, server.staleness, strict=False))
        return [(1.0 + tau.get(k, 0)) ** -self.exponent for k in server.replies.clients]

    def average(self, server: Server) -> Params:
        """(1/K) sum_k s(tau_k) Delta_k, times the server's step size."""
        return self.shortened(server, weighted_mean(server.omega, server.replies.deltas))

    def shortened(self, server: Server, mean: Params) -> Params:
        """The mean by s(tau_k), times server_lr and the mean of s(tau_k) by the weights before."""
        scales = self.scales(server)
        if {self.server_lr, *scales} == {1.0}:  # the bits of FedAvg
            return mean
        by = sum(p * s for p, s in zip(server.base.tolist(), scales, strict=True))
        return scale(self.server_lr * by, mean)
