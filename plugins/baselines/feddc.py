"""FedDC. Gao, Fu, Li, Chen, Xu, Xu: FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and
Correction, CVPR 2022. https://arxiv.org/abs/2203.11751. The authors' code: https://github.com/gaoliang13/FedDC

Algorithm 1: the local loss is f_k(w) + (alpha/2) ||w - (w_t - h_k)||^2 + <w, Delta - Delta_k> and enters by its
gradient; the reported loss is f_k. h_k is the client's drift, Delta_k and Delta are SCAFFOLD's c_i and c of the whole
gradient.
- As in the authors' code, w = mean over S of w_k + mean over all clients of h_k, both uniform. The server knows that
  mean of h_k from the models it gets, so h_k does not travel: 4M, w and Delta down, w_k and Delta_k's change up.
- K is the number of steps that the client took; the authors' code has that of the mean client for everybody.
- Left out are two details of the authors' code, both neutral for equal clients and small gradients: alpha and Delta are
  divided by n_k / mean n on the client, and gradients are clipped at 10.
- With local momentum the correction is added to the gradient before the momentum.

Meeting others: with FNR-FL, h_k and Delta_k come from the local training and the mean from the refined models. With
CCN, the mean over S has CCN's weights and the rest stays uniform. Its FedML pair is `make_pair("feddc")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from plugins.core.component import Component, Data, Desk, RecipeError, Setting, Trace, Update, View
from plugins.core.task import Task
from plugins.core.trees import Params, Tree, add, sub, tree_map, zeros_like


@dataclass(frozen=True)
class FedDC(Component):
    """Lets every client learn its own drift from the server's model, and takes it out of the average."""

    name: ClassVar[str] = "feddc"
    broadcasts: ClassVar[bool] = True
    claims: ClassVar[frozenset[str]] = frozenset(
        {"client drift correction", "proximal term", "server step", "clients' average"}
    )
    weighting: ClassVar[str] = "uniform"

    n_clients: int  # N
    alpha: float = 0.01  # the authors' script for CIFAR-10

    def check(self, setting: Setting) -> None:
        if not self.alpha >= 0:
            raise RecipeError(f"feddc: alpha = {self.alpha} must be at least 0")
        if setting.optimizer != "sgd":
            raise RecipeError(
                f"feddc: train.optimizer = {setting.optimizer!r} has no fixed step size, which Delta_k divides by; "
                "allowed: sgd"
            )

    def init_client(self, params: Params, buffers: Params, task: Task) -> Tree:
        return {"h": zeros_like(params), "Delta": zeros_like(params)}

    def correct(self, tree: Params, params: Params, view: View) -> Params:
        """g + alpha (w - (w_t - h_k)) + Delta - Delta_k."""
        own, shared = view.memory, view.shared
        return tree_map(
            lambda g, w, w_t, h_k, delta, delta_k: g + self.alpha * (w - (w_t - h_k)) + delta - delta_k,
            tree, params, view.start, own["h"], shared["Delta"], own["Delta"],
        )  # fmt: skip

    def report(self, task: Task, trace: Trace, view: View, data: Data) -> tuple[Tree, Tree]:
        """h_k <- h_k + w_k - w_t; Delta_k <- Delta_k - Delta + (w_t - w_k) / (K eta)."""
        own, k_eta = view.memory, trace.steps.clamp(min=1) * task.lr
        moved = sub(trace.end, trace.start)
        new = tree_map(lambda own, shared, d: own - shared - d / k_eta, own["Delta"], view.shared["Delta"], moved)
        return {"dDelta": sub(new, own["Delta"])}, {"h": add(own["h"], moved), "Delta": new}

    def init_server(self, params: Params, desk: Desk) -> Tree:
        return {"h": zeros_like(params), "Delta": zeros_like(params)}

    def broadcast(self, state: Tree) -> Tree:
        return {"Delta": state["Delta"]}

    def step(self, direction: Params, state: Tree, update: Update) -> tuple[Params, Tree]:
        """Delta <- Delta + (1/N) sum over S of Delta_k's change; w = mean over S of w_k + (1/N) sum over all of h_k."""

        def renewed(mean: torch.Tensor, changes: torch.Tensor) -> torch.Tensor:
            return mean + changes.sum(0) / self.n_clients

        delta = tree_map(renewed, state["Delta"], update.replies.upload[self.name]["dDelta"])
        h = tree_map(renewed, state["h"], update.trained)
        return add(direction, h), {"h": h, "Delta": delta}
