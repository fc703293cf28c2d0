"""SCAFFOLD (Karimireddy et al. 2020), algorithm 1 with option II, against arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from plugins.core.component import RecipeError
from plugins.engines.simulation import LocalTraining, Schedule, Simulation, draw_cohort
from tests.methods import by_hand as hand

ETA_G = 0.6


class Reference:
    """Algorithm 1, line by line."""

    def __init__(self) -> None:
        self.x, self.c = hand.W0, hand.zeros()
        self.c_i = [hand.zeros() for _ in hand.CLIENTS]

    def local(self, i: int, batches: list[hand.Array]) -> tuple[hand.Tree, hand.Tree]:
        """Lines 7-12: (y_i, c_i+)."""
        c, c_i = self.c, self.c_i[i]

        def direction(y: hand.Tree, x: hand.Array, labels: hand.Array) -> hand.Tree:
            return hand.each(lambda g, c_i, c: g - c_i + c, hand.gradient(y, x, labels), c_i, c)  # line 10

        y = hand.descend(self.x, batches, direction)
        k_eta = len(batches) * hand.LR  # K, the steps really taken
        return y, hand.each(lambda c_i, c, x, y: c_i - c + (x - y) / k_eta, c_i, c, self.x, y)  # line 12 (ii)

    def round(self, cohort: tuple[int, ...], batches: list[list[hand.Array]], eta_g: float) -> None:
        found = [self.local(i, of) for i, of in zip(cohort, batches, strict=True)]
        uniform = [1 / len(cohort)] * len(cohort)
        dx = hand.average(uniform, [hand.each(np.subtract, y, self.x) for y, _ in found])  # line 16
        dc = hand.average(
            uniform, [hand.each(np.subtract, new, self.c_i[i]) for i, (_, new) in zip(cohort, found, strict=True)]
        )
        self.x = hand.each(lambda x, d: x + eta_g * d, self.x, dx)  # line 17
        self.c = hand.each(lambda c, d: c + len(cohort) / 3 * d, self.c, dc)  # line 17, |S| / N
        for i, (_, new) in zip(cohort, found, strict=True):
            self.c_i[i] = new


def compare(ran: hand.Ran, reference: Reference) -> None:
    hand.same(ran.outcome.params, reference.x)
    hand.same(ran.state("scaffold")["c"], reference.c)
    for i in range(3):
        hand.same({key: leaf[i] for key, leaf in ran.memory("scaffold")["c_i"].items()}, reference.c_i[i])


def test_three_rounds_of_everybody(engine: str) -> None:
    ran = hand.run("scaffold", {"scaffold": {"server_lr": ETA_G}}, engine=engine, rounds=3)
    reference = Reference()
    for _ in range(3):
        reference.round((0, 1, 2), [[client] * 2 for client in hand.CLIENTS], ETA_G)
    compare(ran, reference)


def test_partial_participation_and_unequal_numbers_of_steps(engine: str) -> None:
    """Batches of 1: K = 2, 4, 6 steps. The clients that are not drawn keep c_i; c moves by |S|/N of the mean."""
    ran = hand.run("scaffold", engine=engine, rounds=4, cohort=2, batch_size=1)
    reference = Reference()
    for t in range(1, 5):
        cohort = draw_cohort(0, t, 3, 2)
        batches = [ran.batches(i, t) for i in cohort]
        assert [len(of) for of in batches] == [2 * hand.SIZES[i] for i in cohort]
        reference.round(cohort, batches, 1.0)
    compare(ran, reference)


def test_under_full_participation_c_is_the_mean_of_the_c_i(engine: str) -> None:
    """c = (1/N) sum_i c_i, which algorithm 1 keeps from c = c_i = 0 on."""
    ran = hand.run("scaffold", engine=engine, rounds=3)
    for key, c in ran.state("scaffold")["c"].items():
        torch.testing.assert_close(c, ran.memory("scaffold")["c_i"][key].mean(0), rtol=1e-10, atol=1e-14)


def test_after_one_full_batch_step_c_i_is_the_gradient_at_the_received_model(engine: str) -> None:
    """Line 12 (ii) with K = 1: c_i - c + (g - c_i + c) = g."""
    ran = hand.run("scaffold", engine=engine, rounds=2, epochs=1)
    received = {key: leaf.numpy() for key, leaf in ran.exchanges[1][0].params.items()}
    for i, client in enumerate(hand.CLIENTS):
        wanted = hand.gradient(received, hand.X[client], hand.Y[client])
        hand.same({key: leaf[i] for key, leaf in ran.memory("scaffold")["c_i"].items()}, wanted)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_optimisers_without_a_fixed_step_are_refused(optimizer: str) -> None:
    data = hand.samples(hand.X, hand.Y)
    with pytest.raises(RecipeError, match=rf"scaffold.*{optimizer}.*allowed: sgd"):
        Simulation(
            "scaffold", {}, hand.given(), data, list(hand.CLIENTS), data, None, None,
            LocalTraining(optimizer, 0.1, 1, 2), Schedule(1, 3, 0),
        )  # fmt: skip


def test_a_server_lr_of_zero_is_refused() -> None:
    with pytest.raises(RecipeError, match="server_lr"):
        hand.run("scaffold", {"scaffold": {"server_lr": 0.0}})
