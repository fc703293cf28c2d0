"""SCAFFOLD. Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: Stochastic Controlled Averaging for Federated Learning,
ICML 2020. https://arxiv.org/abs/1910.06378

Algorithm 1 with option II for c_i. With local momentum the correction is added to the gradient before the momentum.
- `option="I"`: c_i+ is the gradient of the mean cross-entropy over the whole local data at the received model, one more
  pass. It is taken in eval mode, with the batch norms' statistics that were received, since those of a whole set in
  batches are not defined. Weight decay and other methods' terms are not in it. It divides by no step size, so Adam and
  RMSProp are allowed; they take the corrected gradient.
- Clients are averaged uniformly, as there; `weights="size"`: the model by n_k, as in NIID-Bench. The control variates
  stay uniform.

Meeting others: with FNR-FL, c_i is computed from the local training only, not from the refinement. With CCN, the model
step uses CCN's weights and the control variates stay uniform. Its FedML pair is `make_pair("scaffold")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from plugins.core.component import Batch, Component, Data, Desk, Options, RecipeError, Setting, Trace, Update, View
from plugins.core.task import Task
from plugins.core.trees import Params, Tree, scale, sub, tree_map, zeros_like


@dataclass(frozen=True)
class Scaffold(Component):
    """Corrects each local step by the difference of the server's and the client's control variate."""

    name: ClassVar[str] = "scaffold"
    options: ClassVar[Options] = {"weights": ("uniform", "size"), "option": ("II", "I")}
    broadcasts: ClassVar[bool] = True
    claims: ClassVar[frozenset[str]] = frozenset({"client drift correction"})

    n_clients: int  # N
    server_lr: float = 1.0  # eta_g, rFedAvg section VI-A
    weights: str = "uniform"
    option: str = "II"

    @property
    def passes(self) -> frozenset[str]:  # an option decides
        return frozenset({"own"} if self.option == "I" else ())

    @property
    def weighting(self) -> str:
        return self.weights

    def check(self, setting: Setting) -> None:
        if not self.server_lr > 0:
            raise RecipeError(f"scaffold: server_lr = {self.server_lr} must be above 0")
        if self.option == "II" and setting.optimizer != "sgd":
            raise RecipeError(
                f"scaffold: train.optimizer = {setting.optimizer!r} has no fixed step size, which option II "
                "of the control variate divides by; allowed: sgd, or scaffold.option = I"
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
        """Line 12: c_i+ = g_i(x) (i), or c_i - c + (x - y_i) / (K eta) (ii)."""
        c_i, c = view.memory["c_i"], view.shared["c"]
        if self.option == "I":
            c_new = _gradient(task, view, data)
        else:
            k_eta = trace.steps.clamp(min=1) * task.lr
            c_new = tree_map(lambda c_i, c, x, y: c_i - c + (x - y) / k_eta, c_i, c, trace.start, trace.end)
        return {"dc": sub(c_new, c_i)}, {"c_i": c_new}

    def step(self, direction: Params, state: Tree, update: Update) -> tuple[Params, Tree]:
        """Lines 16-17: x <- x + eta_g mean(y_i - x); c <- c + (|S| / N) mean over S of dc_i."""
        share = len(update.replies.clients) / self.n_clients
        dc = update.replies.upload[self.name]["dc"]  # [M, ...]
        return scale(self.server_lr, direction), {"c": tree_map(lambda c, d: c + share * d.mean(0), state["c"], dc)}


def _gradient(task: Task, view: View, data: Data) -> Params:
    """g_i(x), the gradient at the received model of the mean cross-entropy over the whole local data."""
    assert data.own is not None

    def sums(batch: Batch) -> Params:
        def total(w: Params) -> Tensor:
            logits = task.forward(w, view.buffers, batch.x, train=False).logits
            losses = F.cross_entropy(logits, batch.y, reduction="none")  # [B]
            return losses.sum() if batch.mask is None else batch.mask.to(losses.dtype) @ losses

        found: Params = torch.func.grad(total)(view.start)
        return found

    return data.own.mean(sums)
