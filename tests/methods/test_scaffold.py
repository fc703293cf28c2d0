"""SCAFFOLD (Karimireddy et al. 2020), algorithm 1 with options I and II, against arithmetic by
hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.baselines.scaffold_i import ScaffoldI
from fedml_noniid.plugins.core.component import Client, Trace
from fedml_noniid.plugins.core.data import Pass, Samples
from fedml_noniid.plugins.core.optimizers import SGD
from fedml_noniid.plugins.core.options import RecipeError
from fedml_noniid.plugins.core.task import Output, Task
from fedml_noniid.plugins.engines.cohort import draw_cohort
from fedml_noniid.plugins.engines.federation import Federation
from fedml_noniid.plugins.engines.plan import LocalTraining, Plan
from fedml_noniid.plugins.simulate import simulate
from tests.methods import by_hand as hand
from tests.methods import convex

ETA_G = 0.6
BOTH = pytest.mark.parametrize("recipe", ["scaffold", "scaffold_i"])  # options II and I of line 12


class Reference:
    """Algorithm 1, line by line."""

    def __init__(
        self, recipe: str = "scaffold", weights: str = "uniform", adam: float = 0.0
    ) -> None:
        self.recipe, self.weights, self.adam = recipe, weights, adam
        self.x, self.c, self.lr = hand.W0, hand.zeros(), hand.LR
        self.c_i = [hand.zeros() for _ in hand.CLIENTS]

    def local(self, i: int, batches: list[hand.Array]) -> tuple[hand.Tree, hand.Tree]:
        """Lines 7-12: (y_i, c_i+)."""
        c, c_i = self.c, self.c_i[i]

        def direction(y: hand.Tree, x: hand.Array, labels: hand.Array) -> hand.Tree:
            return hand.each(
                lambda g, c_i, c: g - c_i + c, hand.gradient(y, x, labels), c_i, c
            )  # line 10

        y = (
            self.by_adam(batches, direction)
            if self.adam
            else hand.descend(self.x, batches, direction, self.lr)
        )
        if self.recipe == "scaffold_i":  # line 12 (i): g_i(x), over the whole local data
            return y, hand.gradient(self.x, hand.X[hand.CLIENTS[i]], hand.Y[hand.CLIENTS[i]])
        k_eta = len(batches) * self.lr  # K, the steps really taken
        return y, hand.each(
            lambda c_i, c, x, y: c_i - c + (x - y) / k_eta, c_i, c, self.x, y
        )  # line 12 (ii)

    def by_adam(self, batches: list[hand.Array], direction: Any) -> hand.Tree:
        """Kingma and Ba 2015, algorithm 1."""
        w, m, v = self.x, hand.zeros(), hand.zeros()
        for t, batch in enumerate(batches, start=1):
            g = direction(w, hand.X[batch], hand.Y[batch])
            m = hand.each(lambda m, g: 0.9 * m + 0.1 * g, m, g)
            v = hand.each(lambda v, g: 0.999 * v + 0.001 * g**2, v, g)
            w = hand.each(
                lambda w, m, v, t=t: (
                    w - self.adam * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
                ),
                w,
                m,
                v,
            )
        return w

    def round(self, cohort: tuple[int, ...], batches: list[list[hand.Array]], eta_g: float) -> None:
        found = [self.local(i, of) for i, of in zip(cohort, batches, strict=True)]
        uniform = [1 / len(cohort)] * len(cohort)
        n = [hand.SIZES[i] for i in cohort]
        p = uniform if self.weights == "uniform" else [n_i / sum(n) for n_i in n]
        dx = hand.average(p, [hand.each(np.subtract, y, self.x) for y, _ in found])  # line 16
        dc = hand.average(
            uniform,
            [
                hand.each(np.subtract, new, self.c_i[i])
                for i, (_, new) in zip(cohort, found, strict=True)
            ],
        )
        self.x = hand.each(lambda x, d: x + eta_g * d, self.x, dx)  # line 17
        self.c = hand.each(lambda c, d: c + len(cohort) / 3 * d, self.c, dc)  # line 17, |S| / N
        for i, (_, new) in zip(cohort, found, strict=True):
            self.c_i[i] = new


def compare(ran: hand.Ran, reference: Reference) -> None:
    hand.same(ran.outcome.params, reference.x)
    hand.same(ran.state(reference.recipe)["c"], reference.c)
    for i in range(3):
        hand.same(
            {key: leaf[i] for key, leaf in ran.memory(reference.recipe)["c_i"].items()},
            reference.c_i[i],
        )


def test_three_rounds_of_everybody(engine: str) -> None:
    ran = hand.run("scaffold", {"scaffold": {"server_lr": ETA_G}}, engine=engine, rounds=3)
    reference = Reference()
    for _ in range(3):
        reference.round((0, 1, 2), [[client] * 2 for client in hand.CLIENTS], ETA_G)
    compare(ran, reference)


def test_partial_participation_and_unequal_numbers_of_steps(engine: str) -> None:
    """Batches of 1: K = 2, 4, 6 steps.

    The clients that are not drawn keep c_i; c moves by |S|/N of the mean.
    """
    ran = hand.run("scaffold", engine=engine, rounds=4, cohort=2, batch_size=1)
    reference = Reference()
    for t in range(1, 5):
        cohort = draw_cohort(0, t, 3, 2)
        batches = [ran.batches(i, t) for i in cohort]
        assert [len(of) for of in batches] == [2 * hand.SIZES[i] for i in cohort]
        reference.round(cohort, batches, 1.0)
    compare(ran, reference)


@BOTH
@pytest.mark.parametrize("weights", ["uniform", "size"])
def test_the_options(engine: str, recipe: str, weights: str) -> None:
    """Batches of 2, so that c_i of option I is no step's gradient."""
    settings = {recipe: {"weights": weights, "server_lr": ETA_G}}
    ran = hand.run(recipe, settings, engine=engine, rounds=4, cohort=2, batch_size=2)
    reference = Reference(recipe, weights)
    for t in range(1, 5):
        cohort = draw_cohort(0, t, 3, 2)
        reference.round(cohort, [ran.batches(i, t) for i in cohort], ETA_G)
    compare(ran, reference)


def test_adam_takes_the_corrected_gradient_with_option_one(engine: str) -> None:
    data, lr = hand.samples(hand.X, hand.Y), 0.05
    simulation = simulate(
        "scaffold_i",
        {},
        Federation.of(data, list(hand.CLIENTS), data),
        Plan(hand.given(), LocalTraining("adam", lr, 2, 8), 3, 3, 0, engine=engine),
    )
    reference = Reference("scaffold_i", adam=lr)
    for _ in range(3):
        reference.round((0, 1, 2), [[client] * 2 for client in hand.CLIENTS], 1.0)
    compare(hand.Ran(simulation, simulation.run(), []), reference)


def test_weight_decay_is_no_part_of_option_one(engine: str) -> None:
    ran = hand.run("scaffold_i", engine=engine, rounds=1, weight_decay=0.3)
    for i, client in enumerate(hand.CLIENTS):
        wanted = hand.gradient(hand.W0, hand.X[client], hand.Y[client])
        hand.same({key: leaf[i] for key, leaf in ran.memory("scaffold_i")["c_i"].items()}, wanted)


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
    network, w, received = Recorded(), {"w": torch.tensor(0.4)}, {"seen": "received"}
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
    trace = Trace({"w": torch.tensor(9.0)}, {}, one, one, {}, one, 1)
    upload, memory, *_ = ScaffoldI().report(trace, client)
    assert network.calls == [({"seen": "received"}, False)] * 2
    wanted = np.mean([-x / (1 + np.exp(0.4 * x)) for x in (1, 2, 3)])
    assert memory["c_i"]["w"].item() == pytest.approx(wanted, rel=1e-6)
    assert upload["dc"]["w"].item() == pytest.approx(wanted + 0.2, rel=1e-6)


@BOTH
def test_its_fixed_point_is_the_minimiser_of_the_mean_loss(recipe: str) -> None:
    wanted = convex.minimiser([1 / 3] * 3)
    found = convex.run(recipe, {}, 30, epochs=6)
    assert convex.distance(found, wanted) < 1e-3 * convex.distance(convex.START, wanted)


def test_under_full_participation_c_is_the_mean_of_the_c_i(engine: str) -> None:
    """c = (1/N) sum_i c_i, which algorithm 1 keeps from c = c_i = 0 on."""
    ran = hand.run("scaffold", engine=engine, rounds=3)
    for key, c in ran.state("scaffold")["c"].items():
        torch.testing.assert_close(
            c, ran.memory("scaffold")["c_i"][key].mean(0), rtol=1e-10, atol=1e-14
        )


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
    with pytest.raises(
        RecipeError, match=rf"scaffold.*{optimizer}.*allowed: sgd, or the recipe scaffold_i"
    ):
        simulate(
            "scaffold",
            {},
            Federation.of(data, list(hand.CLIENTS), data),
            Plan(hand.given(), LocalTraining(optimizer, 0.1, 1, 2), 1, 3, 0),
        )


def test_a_server_lr_of_zero_is_refused() -> None:
    with pytest.raises(RecipeError, match="server_lr"):
        hand.run("scaffold", {"scaffold": {"server_lr": 0.0}})
