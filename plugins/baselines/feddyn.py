"""FedDyn. Acar, Zhao, Matas, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic Regularization,
ICLR 2021. https://arxiv.org/abs/2111.04263. The authors' code: https://github.com/alpemreacar/FedDyn

Algorithm 1: the local loss is f_k(w) - <g_k, w> + (alpha/2) ||w - w_t||^2 and enters by its gradient; the reported loss
is f_k. Clients are averaged uniformly; h moves by 1/N, N all clients. From g_k = h = 0 on, h is the mean of all g_k.
- The evaluated model is the one that is sent; the authors also report the means of the clients' models.
- `alpha_adapt="authors"`: alpha_k = alpha / (n_k / mean n), as in the authors' code. The server learns the n_k in an
  exchange before round 1, which carries the model of round 1, and sends alpha_k. The server's h / alpha is
  -(1/N) sum (w_k - w_t) whatever alpha is; h keeps the plain one and is then the mean of (n_k / mean n) g_k. So the
  fixed point minimises the mean loss over samples, and without the option that over clients.
- `clip` above 0: the corrected gradient is cut to that norm before each step; the authors clip at 10. In their code the
  part alpha w is outside of that, since it enters as weight decay.
- Any local optimiser: g_k and h are made of models, no step size is involved.

Meeting others: whatever else corrects the gradient is refused, so `clip` sees all of it but weight decay; terms of the
loss are in it. With FNR-FL, g_k and h come from the local training and the mean from the refined models. With CCN, the
mean over S has CCN's weights and h stays uniform: where all w_k are equal, as at the fixed point, any weights agree.
Its FedML pair is `make_pair("feddyn")`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from plugins.core.component import (
    Answer,
    Ask,
    Asks,
    Component,
    Data,
    Desk,
    Exchanges,
    Options,
    RecipeError,
    Reply,
    Server,
    Setting,
    Trace,
    Update,
    View,
    Work,
)
from plugins.core.task import Task
from plugins.core.trees import Params, Tree, leading, norm, scale, tree_map, zeros_like


@dataclass(frozen=True)
class FedDyn(Component):
    """Bends every local loss so that its minimum is one of the mean loss."""

    name: ClassVar[str] = "feddyn"
    options: ClassVar[Options] = {"alpha_adapt": ("off", "authors")}
    claims: ClassVar[frozenset[str]] = frozenset(
        {"client drift correction", "proximal term", "server step", "clients' average"}
    )
    weighting: ClassVar[str] = "uniform"

    n_clients: int  # N
    alpha: float = 0.1  # FedNLR, section 7.1
    alpha_adapt: str = "off"
    clip: float = 0.0  # norm of the gradient; 0: off. The authors' code: 10

    @property
    def broadcasts(self) -> bool:
        return not self.clip  # by one client's norm

    def check(self, setting: Setting) -> None:
        if not self.alpha > 0:
            raise RecipeError(f"feddyn: alpha = {self.alpha} must be above 0, the server divides by it")
        if not self.clip >= 0:
            raise RecipeError(f"feddyn: clip = {self.clip} must be at least 0")

    def exchanges(self, cohort: int) -> Exchanges:
        return Exchanges(begin=int(self.alpha_adapt == "authors"))

    def init_client(self, params: Params, buffers: Params, task: Task) -> Tree:
        return {"g": zeros_like(params)}

    def correct(self, tree: Params, params: Params, view: View) -> Params:
        """The gradient of eq. 1: g - g_k + alpha (w - w_t)."""
        own = view.each.get("alpha")

        def bent(g: Tensor, g_k: Tensor, w: Tensor, w_t: Tensor) -> Tensor:
            return g - g_k + (self.alpha if own is None else leading(own, g)) * (w - w_t)

        tree = tree_map(bent, tree, view.memory["g"], params, view.start)
        return scale((self.clip / norm(tree)).clamp(max=1), tree) if self.clip else tree

    def report(self, task: Task, trace: Trace, view: View, data: Data) -> tuple[Tree, Tree]:
        """g_k <- g_k - alpha (w_k - w_t)."""
        alpha = view.each.get("alpha", self.alpha)
        g = tree_map(lambda g, w_k, w_t: g - alpha * (w_k - w_t), view.memory["g"], trace.end, trace.start)
        return {}, {"g": g}

    def answer(self, job: str, work: Work) -> Answer:
        """Nothing but n_k, which every reply has."""
        return Answer({}, {}, {}, work.view.memory, {})

    def init_server(self, params: Params, desk: Desk) -> Tree:
        state = {"h": zeros_like(params)}
        if self.alpha_adapt == "off":
            return state
        return state | {"alpha": next(iter(params.values())).new_zeros(self.n_clients)}  # known before round 1

    def begin(self, server: Server, clients: tuple[int, ...]) -> Asks:
        """alpha_k = alpha / (n_k / mean n), [N]; alpha for a client whose answer was dropped."""
        if self.alpha_adapt == "off":
            return server
        replies: Reply = yield Ask(f"{self.name}.count", clients, server.params, server.buffers, {}, {})
        state, n = server.state[self.name], replies.n.double()
        rows = torch.tensor(replies.clients, device=n.device)
        alpha = torch.full_like(state["alpha"], self.alpha)
        state = state | {"alpha": alpha.index_copy(0, rows, (self.alpha * n.mean() / n).to(alpha.dtype))}
        return server._replace(state=server.state | {self.name: state})

    def address(self, state: Tree, cohort: tuple[int, ...]) -> Tree:
        return {} if self.alpha_adapt == "off" else {"alpha": state["alpha"][list(cohort)]}  # [M]

    def step(self, direction: Params, state: Tree, update: Update) -> tuple[Params, Tree]:
        """h <- h - (alpha / N) sum over S of (w_k - w_t); w = mean over S of w_k - h / alpha."""
        share = self.alpha / self.n_clients
        h = tree_map(lambda h, delta: h - share * delta.sum(0), state["h"], update.trained)
        return tree_map(lambda d, h: d - h / self.alpha, direction, h), state | {"h": h}
