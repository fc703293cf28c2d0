"""rFedAvg and rFedAvg+ (Wang et al. 2022), algorithms 1 and 2, against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.core.component import Ask
from fedml_noniid.core.randomness import fold, identity, normal
from fedml_noniid.engines.cohort import draw_cohort
from fedml_noniid.plugins import registry
from tests.methods import by_hand as hand

LAM = 0.4
EVERYBODY = (0, 1, 2)
NAMES = ("rfedavg", "rfedavg_plus")
NOISY = {"dp": "paper", "clip": 0.4, "sigma": 0.8, "L": 2}


class Reference:
    """Both algorithms; batches and random numbers are those of the run that it is compared with."""

    def __init__(
        self, name: str, ran: hand.Ran, momentum: float = 0.0, lr: float = hand.LR, **options: Any
    ) -> None:
        self.ran, self.plus, self.options = ran, "plus" in name, options
        self.lr, self.momentum, self.v = lr, momentum, {k: hand.zeros() for k in EVERYBODY}
        self.scope = identity(registry.method(name)())  # the component's number among the keys
        self.w, self.loss = hand.W0, 0.0
        # line 1: delta_0, with w_0
        self.table = np.stack([self.map(self.w, k, "map", 0) for k in EVERYBODY])

    def map(self, w: hand.Tree, k: int, job: str, t: int) -> hand.Array:
        """delta^k = 1/n sum_j phi(w, x_j), with noise if that is asked for."""
        at = fold(self.ran.simulation.engine.clients.keys(Ask(job, (k,)), t)[0], self.scope)
        delta = np.asarray(hand.hidden(w, hand.X[self.mapped(k, at)]).mean(0))
        if "clip" not in self.options:
            return delta
        c_0, size = self.options["clip"], min(self.options["L"], hand.SIZES[k])
        noise = normal(fold(at, "noise"), 2, dtype=torch.float64).numpy()
        within = delta / max(1, np.sqrt((delta**2).sum()) / c_0)
        return np.asarray(within + self.options["sigma"] * c_0 / size * noise)

    def mapped(self, k: int, key: torch.Tensor) -> hand.Array:
        """The samples that a map reads."""
        return hand.CLIENTS[k]

    def compared(self, k: int, cohort: tuple[int, ...]) -> list[int]:
        """The clients whose delta client k compares its own with."""
        return [j for j in EVERYBODY if j != k]

    def begin(self, k: int) -> hand.Tree:
        """The momentum that client k starts with."""
        return hand.zeros()

    def shares(self, cohort: tuple[int, ...]) -> hand.Array:
        """The clients' weights."""
        return hand.shares(cohort)

    def mapping(self, cohort: tuple[int, ...]) -> tuple[int, ...]:
        """The clients that map with the new model."""
        return cohort

    def regulariser(
        self, phi: hand.Array, k: int, cohort: tuple[int, ...]
    ) -> tuple[float, hand.Array]:
        """r_k and its derivative by phi."""
        others = self.table[self.compared(k, cohort)]
        if not self.plus:  # eq. 5: r = 1/(N-1) sum_j ||phi - delta^j||^2
            return ((phi - others) ** 2).sum(1).mean(), 2 * (phi - others).mean(0)
        away = phi - others.mean(0)  # section IV-C: r = ||phi - 1/(N-1) sum_j delta^j||^2
        return (away**2).sum(), 2 * away

    def round(self, t: int, cohort: tuple[int, ...]) -> None:
        local, losses = [], []
        for k in cohort:
            v, w_k, of_steps = self.begin(k), self.w, []
            for batch in self.ran.batches(k, t):
                x, y = hand.X[batch], hand.Y[batch]
                r, dr = self.regulariser(hand.hidden(w_k, x).mean(0), k, cohort)
                of_steps.append(hand.loss(w_k, x, y) + LAM * r)
                # every sample is 1/B of the mean
                g = hand.gradient(w_k, x, y, dh=LAM * dr / len(batch))
                v = hand.each(lambda v, g: self.momentum * v + g, v, g)
                w_k = hand.each(lambda w, v: w - self.lr * v, w_k, v)  # line 9 (algorithm 2: 10)
            self.v[k] = v
            local.append(w_k)
            losses.append(np.mean(of_steps))
        self.loss = float(np.mean(losses))
        self.w = hand.average(self.shares(cohort), local)  # line 12
        self.table = self.table.copy()
        if self.plus:  # algorithm 2, line 15: with the new global model
            for k in self.mapping(cohort):
                self.table[k] = self.map(self.w, k, "map", t)
        else:  # algorithm 1, line 10: with the local model
            for k, w in zip(cohort, local, strict=True):
                self.table[k] = self.map(w, k, "train", t)


def compare(reference: Reference, name: str) -> None:
    """Three rounds of two of three clients: the rows of those that are absent stay."""
    ran = reference.ran
    cohorts = [draw_cohort(0, t, 3, 2) for t in (1, 2, 3)]
    assert len(set(cohorts)) > 1, "the example has an absent client whose row is used"
    for t, cohort in enumerate(cohorts, start=1):
        before, row = reference.table, ran.outcome.rows[t - 1]
        reference.round(t, cohort)
        assert row["local_loss"] == pytest.approx(reference.loss, rel=1e-10)
        # The mean of the cohort's r, the median norm of their delta. Of
        # the delta that the round brought; in rFedAvg+ of those that it used: the map comes later.
        after = reference.table
        reference.table = before if reference.plus else after
        rows = reference.table[list(cohort)]
        terms = [
            reference.regulariser(phi, k, cohort)[0] for phi, k in zip(rows, cohort, strict=True)
        ]
        r = np.mean(terms)
        assert row[f"{name}_r"] == pytest.approx(r, rel=1e-9)
        median = np.median(np.sqrt((rows**2).sum(1)))
        assert row[f"{name}_delta_norm_median"] == pytest.approx(median, rel=1e-9)
        reference.table = after
    hand.same(ran.outcome.params, reference.w)
    np.testing.assert_allclose(ran.state(name)["delta"], reference.table, rtol=1e-10)
    assert reference.table.any(axis=0).all(), "no hidden neuron is dead"


PARTIAL: dict[str, Any] = {"cohort": 2, "rounds": 3, "batch_size": 2, "momentum": 0.5, "lr": 0.12}


@pytest.mark.parametrize("options", [{}, NOISY], ids=["plain", "noise"])
@pytest.mark.parametrize("name", NAMES)
def test_three_rounds_of_partial_participation(
    name: str, options: dict[str, Any], engine: str
) -> None:
    """Two of three clients, mini-batches of 2, momentum."""
    ran = hand.run(name, {name: {"lam": LAM} | options}, engine=engine, **PARTIAL)
    compare(Reference(name, ran, momentum=0.5, lr=0.12, **options), name)
