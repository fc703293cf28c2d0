"""SCAFFOLD (Karimireddy et al. 2020), algorithm 1 with options I and II, against arithmetic by
hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from tests.methods import by_hand as hand

ETA_G = 0.6
BOTH = pytest.mark.parametrize("recipe", ["scaffold", "scaffold_i"])  # options II and I of line 12


class Reference:
    """Algorithm 1, line by line."""

    def __init__(
        self,
        recipe: str = "scaffold",
        weights: str = "uniform",
        eta_g: float = 1.0,
    ) -> None:
        self.eta_g = eta_g
        self.recipe, self.weights = recipe, weights
        self.w, self.c, self.lr = hand.W0, hand.zeros(), hand.LR
        self.c_i = [hand.zeros() for _ in hand.CLIENTS]

    def direction(self, i: int) -> Callable[[hand.Tree, hand.Array, hand.Array], hand.Tree]:
        c, c_i = self.c, self.c_i[i]
        return lambda y, x, labels: hand.each(
            lambda g, c_i, c: g - c_i + c, hand.gradient(y, x, labels), c_i, c
        )  # line 10

    def local(self, i: int, batches: list[hand.Array]) -> tuple[hand.Tree, hand.Tree]:
        """Lines 7-12: (y_i, c_i+)."""
        c, c_i, direction = self.c, self.c_i[i], self.direction(i)
        y = hand.descend(self.w, batches, direction, self.lr)
        if self.recipe == "scaffold_i":  # line 12 (i): g_i(x), over the whole local data
            return y, hand.gradient(self.w, hand.X[hand.CLIENTS[i]], hand.Y[hand.CLIENTS[i]])
        k_eta = len(batches) * self.lr  # K, the steps really taken
        return y, hand.each(
            lambda c_i, c, x, y: c_i - c + (x - y) / k_eta, c_i, c, self.w, y
        )  # line 12 (ii)

    def round(self, cohort: tuple[int, ...], batches: list[list[hand.Array]]) -> None:
        found = [self.local(i, of) for i, of in zip(cohort, batches, strict=True)]
        uniform = [1 / len(cohort)] * len(cohort)
        n = [hand.SIZES[i] for i in cohort]
        p = uniform if self.weights == "uniform" else [n_i / sum(n) for n_i in n]
        dx = hand.average(p, [hand.each(np.subtract, y, self.w) for y, _ in found])  # line 16
        dc = hand.average(
            uniform,
            [
                hand.each(np.subtract, new, self.c_i[i])
                for i, (_, new) in zip(cohort, found, strict=True)
            ],
        )
        self.w = hand.each(lambda x, d: x + self.eta_g * d, self.w, dx)  # line 17
        self.c = hand.each(lambda c, d: c + len(cohort) / 3 * d, self.c, dc)  # line 17, |S| / N
        for i, (_, new) in zip(cohort, found, strict=True):
            self.c_i[i] = new


def compare(ran: hand.Ran, reference: Reference) -> None:
    ran.replay(reference)
    hand.same(ran.outcome.params, reference.w)
    hand.same(ran.state(reference.recipe)["c"], reference.c)
    for i in range(3):
        hand.same(hand.row(ran.memory(reference.recipe)["c_i"], i), reference.c_i[i])


@pytest.mark.parametrize(
    "options", [{"rounds": 3}, *({"rounds": 4, "cohort": 2, "batch_size": b} for b in (1, 2))]
)
@BOTH
@pytest.mark.parametrize("weights", ["uniform", "size"])
def test_its_lines(engine: str, recipe: str, weights: str, options: dict[str, int]) -> None:
    """Everybody with full batches; and two of three with batches of 1: K = 2, 4, 6 steps, or of 2,
    so that c_i of option I is no step's gradient. Clients that are not drawn keep c_i; c moves by
    |S|/N of the mean."""
    settings = {recipe: {"weights": weights, "server_lr": ETA_G}}
    compare(hand.run(recipe, settings, engine=engine, **options), Reference(recipe, weights, ETA_G))


def test_weight_decay_is_no_part_of_option_one(engine: str) -> None:
    ran = hand.run("scaffold_i", engine=engine, rounds=1, weight_decay=0.3)
    for i, client in enumerate(hand.CLIENTS):
        wanted = hand.gradient(hand.W0, hand.X[client], hand.Y[client])
        hand.same(hand.row(ran.memory("scaffold_i")["c_i"], i), wanted)
