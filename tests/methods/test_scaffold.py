"""SCAFFOLD (Karimireddy et al. 2020), algorithm 1 with options I and II, against arithmetic by
hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.core.component import Client, Trace
from fedml_noniid.core.data import Pass, Samples
from fedml_noniid.core.optimizers import SGD
from fedml_noniid.core.task import Output, Task
from fedml_noniid.plugins.baselines.scaffold_i import ScaffoldI
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
        adam: float = 0.0,
    ) -> None:
        self.eta_g = eta_g
        self.recipe, self.weights, self.adam = recipe, weights, adam
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
        y = (
            self.by_adam(batches, direction)
            if self.adam
            else hand.descend(self.w, batches, direction, self.lr)
        )
        if self.recipe == "scaffold_i":  # line 12 (i): g_i(x), over the whole local data
            return y, hand.gradient(self.w, hand.X[hand.CLIENTS[i]], hand.Y[hand.CLIENTS[i]])
        k_eta = len(batches) * self.lr  # K, the steps really taken
        return y, hand.each(
            lambda c_i, c, x, y: c_i - c + (x - y) / k_eta, c_i, c, self.w, y
        )  # line 12 (ii)

    def by_adam(self, batches: list[hand.Array], direction: Any) -> hand.Tree:
        w, optimizer = self.w, hand.Adam(self.w)
        for batch in batches:
            w = optimizer.step(w, direction(w, hand.X[batch], hand.Y[batch]), self.adam)
        return w

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


def test_adam_takes_the_corrected_gradient_with_option_one(engine: str) -> None:
    ran = hand.run("scaffold_i", engine=engine, rounds=3, optimizer="adam", lr=0.05)
    compare(ran, Reference("scaffold_i", adam=0.05))


def test_weight_decay_is_no_part_of_option_one(engine: str) -> None:
    ran = hand.run("scaffold_i", engine=engine, rounds=1, weight_decay=0.3)
    for i, client in enumerate(hand.CLIENTS):
        wanted = hand.gradient(hand.W0, hand.X[client], hand.Y[client])
        hand.same(hand.row(ran.memory("scaffold_i")["c_i"], i), wanted)


class Recorded:
    """A network of one number, logits (w x, 0), which remembers how it was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, bool]] = []

    def __call__(
        self, params: Any, buffers: Any, x: Any, train: bool, mask: Any, key: Any
    ) -> Output:
        self.calls.append((buffers, train))
        return Output(x, torch.cat([params["w"] * x, 0 * x], dim=1), buffers)


def test_option_one_runs_the_received_model_in_eval_mode_with_the_received_buffers() -> None:
    """x = 1, 2, 3 in batches of 2 and 1, all of class 0: g = mean of -x / (1 + e^(w x)), at w =
    0.4."""
    samples = Samples(torch.tensor([[1.0], [2.0], [3.0]]), torch.zeros(3, dtype=torch.int64))
    network, w, received = Recorded(), {"w": torch.tensor(0.4)}, {"of": "received"}
    client = Client(
        Task(network, SGD(0.1)),  # type: ignore[arg-type]  # all that is called of a network
        w,
        received,
        1,  # type: ignore[arg-type]  # to tell buffers apart
        local_set=Pass(samples, torch.arange(3), sizes=(2, 1)),
        shared={"c": {"w": torch.tensor(0.1)}},
        memory={"c_i": {"w": torch.tensor(-0.2)}},
    )
    one = torch.tensor(1.0)
    trace = Trace({"w": torch.tensor(9.0)}, {}, one, one, {}, 1)
    upload, memory, *_ = ScaffoldI().report(trace, client)
    assert network.calls == [({"of": "received"}, False)] * 2
    wanted = np.mean([-x / (1 + np.exp(0.4 * x)) for x in (1, 2, 3)])
    assert memory["c_i"]["w"].item() == pytest.approx(wanted, rel=1e-6)
    assert upload["dc"]["w"].item() == pytest.approx(wanted + 0.2, rel=1e-6)
