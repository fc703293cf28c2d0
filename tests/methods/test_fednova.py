"""FedNova (Wang et al. 2020), algorithm 1 and the authors' proximal form, against arithmetic by
hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.methods import by_hand as hand

RHO, MU = 0.6, 0.3
FORMS = [(0.0, 0.0), (RHO, 0.0), (0.0, MU), (RHO, MU)]


def counted(tau: int, rho: float, mu: float, lr: float = hand.LR) -> hand.Array:
    """a_k of the paper as a vector: how often (w_t - w_k) / eta holds the gradient of each of the
    tau steps."""
    moved, v = np.zeros(tau), np.zeros(tau)
    for step in range(tau):
        v = rho * v - lr * mu * moved  # mu (w - w_t) = -mu eta moved
        v[step] += 1
        moved = moved + v
    return moved


class Reference:
    """Algorithm 1, with the momentum and the proximal term in the local steps."""

    def __init__(self, rho: float, mu: float, nu: str = "direction") -> None:
        self.rho, self.mu, self.nu, self.w, self.lr = rho, mu, nu, hand.W0, hand.LR

    def local(self, batches: list[hand.Array]) -> hand.Tree:
        def direction(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
            g = hand.gradient(w, x, y)
            return hand.each(lambda g, w, w_t: g + self.mu * (w - w_t), g, w, self.w)

        return hand.descend(self.w, batches, direction, self.lr, momentum=self.rho)

    def count(self, tau: int) -> float:
        return float(counted(tau, self.rho, self.mu, self.lr).sum())

    def round(self, cohort: tuple[int, ...], batches: list[list[hand.Array]]) -> None:
        tau = np.array([len(of) for of in batches], dtype=float)
        a = np.array([self.count(len(of)) for of in batches])
        local = [self.local(of) for of in batches]
        self.w = combined(self.w, local, hand.shares(cohort), a, tau if self.mu else a, self.nu)


def combined(
    w: hand.Tree, local: list[hand.Tree], p: hand.Array, a: hand.Array, in_tau: hand.Array, nu: str
) -> Any:
    """w - tau_eff sum_k p_k d_k, tau_eff = sum_k p_k in_tau_k."""
    if nu == "weights":
        return hand.average(p / a / (p / a).sum(), local)
    d = [
        hand.each(lambda w, w_k, a_k=a_k: (w - w_k) / a_k, w, w_k)
        for w_k, a_k in zip(local, a, strict=True)
    ]
    return hand.each(lambda w, d: w - (p @ in_tau) * d, w, hand.average(p, d))


@pytest.mark.parametrize("cohort", [2, 3])
@pytest.mark.parametrize(
    ("rho", "mu", "nu"),
    [*((rho, mu, "direction") for rho, mu in FORMS), (0.0, 0.0, "weights"), (RHO, 0.0, "weights")],
)
def test_its_lines(engine: str, rho: float, mu: float, nu: str, cohort: int) -> None:
    """Batches of 1: 2, 4, 6 steps. The direction of "weights", p / a, is shorter than FedNova's by
    tau_eff sum p / a, which is at least 1."""
    options: dict[str, Any] = {"rounds": 3, "cohort": cohort, "batch_size": 1, "momentum": rho}
    ran = hand.run("fednova", {"fednova": {"mu": mu, "nu": nu}}, engine=engine, **options)
    reference = Reference(rho, mu, nu)
    ran.replay(reference)
    hand.same(ran.outcome.params, reference.w)


@pytest.mark.parametrize(("rho", "mu"), FORMS)
def test_a_is_the_number_of_gradients_that_an_update_holds(
    engine: str, rho: float, mu: float
) -> None:
    """Without mu one number goes up beside the model, with it tau too."""
    ran = hand.run(
        "fednova", {"fednova": {"mu": mu}}, engine=engine, rounds=1, batch_size=1, momentum=rho
    )
    sent = ran.exchanges[0][1].upload["fednova"]
    np.testing.assert_allclose(
        sent["a"], [counted(tau, rho, mu).sum() for tau in (2, 4, 6)], rtol=1e-13
    )
    assert sent.keys() == ({"a", "tau"} if mu else {"a"})
    if mu:
        np.testing.assert_array_equal(sent["tau"], [2, 4, 6])


@pytest.mark.parametrize(("nu", "wanted"), [("direction", 7 / 6), ("weights", 1.0)])
def test_the_sum_of_the_coefficients_is_recorded(engine: str, nu: str, wanted: float) -> None:
    """2, 4, 6 steps and p = 1/6, 2/6, 3/6: tau_eff = (2 + 8 + 18) / 6 = 14/3, sum p / a = 3 / 12; 1
    for a mean."""
    ran = hand.run("fednova", {"fednova": {"nu": nu}}, engine=engine, rounds=1, batch_size=1)
    assert ran.outcome.rows[0]["fednova_coefficient_sum"] == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "momentum"), [("adam", None), ("rmsprop", None), ("rmsprop", RHO)]
)
def test_other_optimisers(engine: str, optimizer: str, momentum: float | None) -> None:
    """Adam's mean of gradients is normalised, so a = tau; RMSProp's momentum is not, so it counts
    as SGD's."""
    options: dict[str, Any] = {"lr": 0.05, "batch_size": 1, "rounds": 1, "momentum": momentum}
    ran = hand.run("fednova", engine=engine, optimizer=optimizer, **options)
    wanted = [counted(tau, momentum or 0.0, 0.0).sum() for tau in (2, 4, 6)]
    np.testing.assert_allclose(ran.exchanges[0][1].upload["fednova"]["a"], wanted, rtol=1e-13)
