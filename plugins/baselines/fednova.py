"""FedNova.
Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous
Federated Optimization, NeurIPS 2020. https://arxiv.org/abs/2007.07481. The authors' code:
https://github.com/JYWa/FedNova

Algorithm 1: d_k = (w_t - w_k) / a_k and w_{t+1} = w_t - tau_eff sum_k p_k d_k, with tau_eff = sum_k
p_k a_k. a_k, the paper's ||a_k||_1, is how often the k-th client's update contains a gradient. It
is counted as if each gradient were 1:
- SGD: a = tau, the steps. Momentum rho: a = (tau - rho (1 - rho^tau) / (1 - rho)) / (1 - rho).
- Proximal steps (`mu` above 0, which adds mu (w - w_t) to the gradient): a <- (1 - eta mu) a + 1
  for each step. tau_eff is then the mean of plain steps, sum_k p_k tau_k, as in the authors' code,
  and tau_k goes up too.
- Momentum and proximal steps: c <- rho c + 1 - eta mu a, a <- a + c. Both rules above are special
  cases of it. The authors' code has c <- rho c + 1, a <- (1 - eta mu) (a + c) + 1, which counts
  every gradient once too often (2 - eta mu after one step).
- Adam (CCN compares with it; the paper has SGD): a = tau. The weights in its bias-corrected mean of
  gradients sum to one, so every step counts 1. RMSProp counts as SGD with RMSProp's momentum. Both
  scale the gradient, so a step does not take back the fraction eta mu: mu must be 0.
- Weight decay is part of the gradient, as in the authors' code. Their server momentum (gmf) is
  `sgdm_server` here.
- Without mu, the coefficients of the updates, tau_eff p_k / a_k, sum to (sum_k p_k a_k) (sum_k p_k
  / a_k). The sum is 1 if all a_k are equal and above 1 if they differ. Above 1, the new model lies
  beyond the clients' mean. `coefficient_sum` records it.
- Buffers are averaged with the clients' weights. NIID-Bench's FedNova normalises batch norms'
  statistics too.
- `nu="weights"`: the clients' weights become p_k / a_k, divided by their sum, and the average is
  the plain weighted mean. This is for CCN: its Lambda_k then multiplies p_k / a_k. The step is then
  no longer tau_eff long.

Meeting others: with `nu="direction"` CCN's c_k take the place of p_k in both sums. FNR-FL's refined
models are averaged, and a_k counts the local training only. a_k ignores other changes of the local
gradient. FedProx is refused, because `mu` is the same term. Its FedML pair is
`make_pair("fednova")`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fedml_noniid.core.component import (
    Answer,
    Change,
    Client,
    Component,
    Exclusive,
    Needs,
    Replies,
    Server,
    Setting,
    Trace,
)
from fedml_noniid.core.optimizers import Adam
from fedml_noniid.core.options import NonNegative, Range, RecipeError
from fedml_noniid.core.sums import weighted_sum
from fedml_noniid.core.task import Task
from fedml_noniid.core.trees import Params, tree_map


@dataclass(frozen=True)
class FedNova(Component):
    """Averages the clients' mean gradients rather than their sums."""

    name: ClassVar[str] = "fednova"
    needs: ClassVar[Needs] = Needs(steps=True, replies=Replies.SCALARS)
    exclusive: ClassVar[frozenset[Exclusive]] = frozenset(
        {Exclusive.AVERAGE, Exclusive.PROXIMAL, Exclusive.OPTIMIZER_MEMORY}
    )
    ranges: ClassVar[Mapping[str, Range]] = {
        "a": Range(0.1),
        "tau": Range(1, whole=True),
    }  # a is 1 after one step

    mu: NonNegative = 0.0  # the authors' code
    nu: Literal["direction", "weights"] = "direction"

    def check(self, setting: Setting) -> None:
        if self.mu * setting.lr >= 1:
            raise RecipeError(
                f"fednova: mu = {self.mu} must be below 1 / lr = {1 / setting.lr}, "
                "where one step would take the client back to the received model"
            )
        if self.mu and setting.optimizer != "sgd":
            raise RecipeError(
                f"fednova: mu = {self.mu} with optimizer = {setting.optimizer!r}, whose "
                "steps do not have "
                "the length eta mu that a_k counts; allowed: 0, or the optimizer sgd"
            )

    def gradient_term(self, w: Params, client: Client) -> Params | None:
        """mu (w - w_t)."""
        return tree_map(lambda w, w_t: self.mu * (w - w_t), w, client.params) if self.mu else None

    def report(self, trace: Trace, client: Client) -> Answer:
        """a_k; with mu, tau_k too."""
        tau = trace.steps.clamp(min=1)
        # Clients take different numbers of steps, so this is a table of a after 0, 1, ... `planned`
        # steps.
        a = (
            tau.new_tensor(self.counts(client.task, trace.planned))
            .index_select(0, tau.long().reshape(1))
            .reshape(())
        )
        return Answer({"a": a, "tau": tau} if self.mu else {"a": a})

    def counts(self, task: Task, steps: int) -> list[float]:
        """a after 0, 1, ... `steps` steps."""
        rho = 0.0 if isinstance(task.optimizer, Adam) else task.optimizer.momentum
        back = task.lr * self.mu
        a, c = [0.0], 0.0
        for _ in range(max(steps, 1)):
            c = rho * c + 1 - back * a[-1]
            a.append(a[-1] + c)
        return a

    def weigh(self, server: Server) -> Tensor | None:
        """With nu = "weights", 1 / a_k."""
        return 1 / server.replies.upload["a"].double() if self.nu == "weights" else None

    def coefficients(self, server: Server) -> Tensor:
        """Of the clients' updates, [M]: tau_eff p_k / a_k, or the weights that `weigh` led to."""
        p, sent = server.weights, server.replies.upload
        if self.nu == "weights":
            return p
        a = sent["a"].to(p.dtype)
        tau_eff = p @ (sent["tau"].to(p.dtype) if self.mu else a)
        coefficient: Tensor = tau_eff * p / a
        return coefficient

    def average(self, server: Server) -> Params:
        """-tau_eff sum_k p_k d_k = sum_k (tau_eff p_k / a_k) (w_k - w_t)."""
        return weighted_sum(self.coefficients(server), server.replies.deltas)

    def step(self, server: Server) -> Change:
        """The sum of the coefficients: 1 for a mean of the clients' updates; above 1 the step goes
        beyond a mean."""
        return Change(metrics={"coefficient_sum": self.coefficients(server).sum()})
