"""SCAFFOLD. Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: Stochastic Controlled Averaging for Federated Learning,
ICML 2020. https://arxiv.org/abs/1910.06378

Algorithm 1 with option II for c_i. Clients are averaged uniformly, as there. With local momentum the correction is
added to the gradient before the momentum. Its FedML pair is `make_pair("scaffold")`.

With FNR-FL, c_i is computed from the local training only, not from the refinement. With CCN, the model step uses CCN's
weights and the control variates stay uniform.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from plugins.core.component import Component, Data, Desk, RecipeError, Setting, Trace, Update, View
from plugins.core.task import Task
from plugins.core.trees import Params, Tree, scale, sub, tree_map, zeros_like


@dataclass(frozen=True)
class Scaffold(Component):
    """Corrects each local step by the difference of the server's and the client's control variate."""

    name: ClassVar[str] = "scaffold"
    claims: ClassVar[frozenset[str]] = frozenset({"client drift correction"})
    weighting: ClassVar[str] = "uniform"

    n_clients: int  # N
    server_lr: float = 1.0  # eta_g, rFedAvg section VI-A

    def check(self, setting: Setting) -> None:
        if not self.server_lr > 0:
            raise RecipeError(f"scaffold: server_lr = {self.server_lr} must be above 0")
        if setting.optimizer != "sgd":
            raise RecipeError(
                f"scaffold: train.optimizer = {setting.optimizer!r} has no fixed step size, which option II "
                "of the control variate divides by; allowed: sgd"
            )

    def init_server(self, params: Params, desk: Desk) -> Tree:
        return {"c": zeros_like(params)}

    def init_client(self, params: Params, buffers: Params, task: Task) -> Tree:
        return {"c_i": zeros_like(params)}

    def broadcast(self, state: Tree) -> Tree:
        return {"c": state["c"]}

    def correct(self, tree: Params, params: Params, view: View) -> Params:
        """Line 10: g_i(y) - c_i + c."""
        return tree_map(lambda g, c_i, c: g - c_i + c, tree, view.memory["c_i"], view.shared["c"])

    def report(self, task: Task, trace: Trace, view: View, data: Data) -> tuple[Tree, Tree]:
        """Line 12 (ii): c_i+ = c_i - c + (x - y_i) / (K eta)."""
        c_i, c = view.memory["c_i"], view.shared["c"]
        k_eta = trace.steps.clamp(min=1) * task.lr
        c_new = tree_map(lambda c_i, c, x, y: c_i - c + (x - y) / k_eta, c_i, c, trace.start, trace.end)
        return {"dc": sub(c_new, c_i)}, {"c_i": c_new}

    def step(self, direction: Params, state: Tree, update: Update) -> tuple[Params, Tree]:
        """Lines 16-17: x <- x + eta_g mean(y_i - x); c <- c + (|S| / N) mean over S of dc_i."""
        share = len(update.replies.clients) / self.n_clients
        dc = update.replies.upload[self.name]["dc"]  # [M, ...]
        return scale(self.server_lr, direction), {"c": tree_map(lambda c, d: c + share * d.mean(0), state["c"], dc)}
