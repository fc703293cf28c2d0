"""SGDM: SGD with momentum. Liu, Chen, Chen, Zhang: Accelerating Federated Learning via Momentum Gradient Descent, IEEE
TPDS 31(8), 2020. https://arxiv.org/abs/1910.03197

CCN compares "SGDM" and cites this paper and one without momentum, so `form` says which:
- "mfl", Liu et al.: v = gamma v + g, w = w - eta v on the clients. The server averages w and v with the
  same weights and sends both; clients start from its v. Theirs are full batches and everybody in every round; here,
  mini-batches as elsewhere, and v is the average over the last cohort.
- "local": the clients' v starts at 0 in every round.
- "server": heavy ball on the server, d = gamma d + u, w = w + d, with the average update u. MOON's code multiplies u by
  1 - gamma and FL-bench takes Nesterov's step; both are other methods.
gamma = 0.9 is ours, CCN gives none. It is the momentum of local training ("mfl", "local"), so train.momentum must not
say another one; "server" leaves local training alone.

Meeting others: g is the gradient with what others add to it. CCN's weights reach w and v. FNR-FL's refinement runs
with gamma too, from v = 0, and leaves the averaged v alone. With "server", u is the direction that the other
components leave. Its FedML pair is `make_pair("sgdm")`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from plugins.core.component import Component, Data, Desk, Options, RecipeError, Setting, Stage, Trace, Update, View
from plugins.core.optimizers import SGD, Optimizer
from plugins.core.task import Task
from plugins.core.trees import Params, Tree, tree_map, weighted_sum, zeros_like


@dataclass(frozen=True)
class SGDM(Component):
    """Gives SGD a momentum: averaged with the model, or the clients' own, or the server's."""

    name: ClassVar[str] = "sgdm"
    options: ClassVar[Options] = {"form": ("mfl", "local", "server")}
    stage: ClassVar[Stage] = Stage.SCALE  # of the server's step; nothing else here depends on it

    form: str = "mfl"
    gamma: float = 0.9

    @property
    def claims(self) -> frozenset[str]:
        owned: dict[str, set[str]] = {"mfl": {"optimiser's memory"}, "local": set(), "server": {"server step"}}
        return frozenset(owned[self.form])

    @property
    def carries(self) -> bool:
        """Whether v travels; without momentum there is none."""
        return self.form == "mfl" and self.gamma > 0

    def check(self, setting: Setting) -> None:
        if not 0 <= self.gamma < 1:
            raise RecipeError(f"sgdm: gamma = {self.gamma} must lie in [0, 1)")
        if self.form != "server" and setting.optimizer != "sgd":
            raise RecipeError(
                f"sgdm: train.optimizer = {setting.optimizer!r} with form = {self.form!r}, which is SGD with momentum; "
                "allowed: sgd"
            )

    def optimizer(self, given: Optimizer) -> Optimizer:
        """v = gamma v + g, w = w - eta v."""
        if self.form == "server":
            return given
        assert isinstance(given, SGD), "`check` refuses others"
        if given.momentum not in (0, self.gamma):
            raise RecipeError(
                f"sgdm: train.momentum = {given.momentum} and sgdm.gamma = {self.gamma} are the same number of one "
                "optimiser; leave train.momentum at null"
            )
        return dataclasses.replace(given, momentum=self.gamma)

    def warm_start(self, state: Tree, view: View) -> Tree:
        """With "mfl", v_k = v, the server's."""
        return {"v": view.shared["v"]} if self.carries else state

    def report(self, task: Task, trace: Trace, view: View, data: Data) -> tuple[Tree, Tree]:
        """With "mfl", v_k after the last step."""
        return {"v": trace.optimizer["v"]} if self.carries else {}, view.memory

    def init_server(self, params: Params, desk: Desk) -> Tree:
        if self.form == "server":
            return {"d": zeros_like(params)}
        return {"v": zeros_like(params)} if self.carries else {}

    def broadcast(self, state: Tree) -> Tree:
        return {"v": state["v"]} if self.carries else {}

    def step(self, direction: Params, state: Tree, update: Update) -> tuple[Params, Tree]:
        """With "mfl", v = sum_k p_k v_k; with "server", d = gamma d + u, w = w + d."""
        if self.carries:
            return direction, {"v": weighted_sum(update.weights, update.replies.upload[self.name]["v"])}
        if self.form == "server":
            d = tree_map(lambda d, u: self.gamma * d + u, state["d"], direction)
            return d, {"d": d}
        return direction, state
