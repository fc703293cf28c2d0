"""FedDC (Gao et al. 2022), algorithm 1, against arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.core.options import RecipeError
from fedml_noniid.plugins.engines.cohort import draw_cohort
from fedml_noniid.plugins.engines.federation import Federation
from fedml_noniid.plugins.engines.plan import LocalTraining, Plan
from fedml_noniid.plugins.simulate import simulate
from tests.methods import by_hand as hand
from tests.methods import convex

ALPHA = 0.3
SETTINGS: dict[str, dict[str, object]] = {"feddc": {"alpha": ALPHA}}
EVERYBODY = (0, 1, 2)


class Reference:
    """Algorithm 1 for equal clients, with every client's h_k and Delta_k on the table."""

    def __init__(self, rho: float = 0.0) -> None:
        self.w, self.Delta, self.rho = hand.W0, hand.zeros(), rho
        self.h = [hand.zeros() for _ in hand.CLIENTS]
        self.Delta_k = [hand.zeros() for _ in hand.CLIENTS]

    def local(self, k: int, batches: list[hand.Array]) -> hand.Tree:
        """f_k(w) + (alpha/2) ||w - (w_t - h_k)||^2 + <w, Delta - Delta_k>, by its gradient."""
        w, v = self.w, hand.zeros()
        centre = hand.each(np.subtract, self.w, self.h[k])
        linear = hand.each(np.subtract, self.Delta, self.Delta_k[k])
        for batch in batches:
            g = hand.gradient(w, hand.X[batch], hand.Y[batch])
            g = hand.each(
                lambda g, w, centre, linear: g + ALPHA * (w - centre) + linear, g, w, centre, linear
            )
            v = hand.each(lambda v, g: self.rho * v + g, v, g)
            w = hand.each(lambda w, v: w - hand.LR * v, w, v)
        return w

    def round(self, cohort: tuple[int, ...], batches: list[list[hand.Array]]) -> None:
        w_t, Delta = self.w, self.Delta  # noqa: N806, the paper's letter
        local = [self.local(k, of) for k, of in zip(cohort, batches, strict=True)]
        for k, w_k, of in zip(cohort, local, batches, strict=True):
            self.h[k] = hand.each(lambda h, w_k, w_t: h + w_k - w_t, self.h[k], w_k, w_t)
            k_eta = len(of) * hand.LR  # K, the steps really taken
            new = hand.each(
                lambda d_k, d, w_k, w_t, k_eta=k_eta: d_k - d + (w_t - w_k) / k_eta,
                self.Delta_k[k],
                Delta,
                w_k,
                w_t,
            )
            self.Delta = hand.each(
                lambda d, new, old: d + (new - old) / 3, self.Delta, new, self.Delta_k[k]
            )  # 1/N
            self.Delta_k[k] = new
        mean = hand.average([1 / len(cohort)] * len(cohort), local)
        self.w = hand.each(np.add, mean, hand.average([1 / 3] * 3, self.h))  # over all clients


def compare(ran: hand.Ran, reference: Reference) -> None:
    hand.same(ran.outcome.params, reference.w)
    hand.same(ran.state("feddc")["Delta"], reference.Delta)
    for k in EVERYBODY:
        for key, wanted in (("h", reference.h), ("Delta", reference.Delta_k)):
            hand.same({name: leaf[k] for name, leaf in ran.memory("feddc")[key].items()}, wanted[k])


def test_three_rounds_of_everybody(engine: str) -> None:
    ran, reference = hand.run("feddc", SETTINGS, engine=engine, rounds=3), Reference()
    for _ in range(3):
        reference.round(EVERYBODY, [[client] * 2 for client in hand.CLIENTS])
    compare(ran, reference)


@pytest.mark.parametrize("rho", [0.0, 0.5])
def test_partial_participation_and_unequal_numbers_of_steps(engine: str, rho: float) -> None:
    """Batches of 1: 2, 4, 6 steps. Momentum takes the corrected gradient."""
    ran = hand.run("feddc", SETTINGS, engine=engine, rounds=4, cohort=2, batch_size=1, momentum=rho)
    reference = Reference(rho)
    for t in range(1, 5):
        cohort = draw_cohort(0, t, 3, 2)
        reference.round(cohort, [ran.batches(k, t) for k in cohort])
    compare(ran, reference)


@pytest.mark.parametrize("cohort", [2, 3])
@pytest.mark.parametrize("recipe", ["feddc", "feddc+fnr"])
def test_the_server_has_the_means_of_everybodys_drift(
    engine: str, cohort: int, recipe: str
) -> None:
    """Delta and the mean of h_k follow the clients whoever takes part, and whatever a refinement
    does to w_k."""
    chosen = SETTINGS | (
        {"fnr": {"p": 1.0, "epochs": 1, "batch_size": 2}} if "fnr" in recipe else {}
    )
    ran = hand.run(recipe, chosen, engine=engine, rounds=4, cohort=cohort, batch_size=1)
    for what in ("h", "Delta"):
        for key, mean in ran.state("feddc")[what].items():
            assert mean.abs().max() > 1e-3
            torch.testing.assert_close(
                mean, ran.memory("feddc")[what][key].mean(0), rtol=1e-10, atol=1e-14
            )


def test_after_one_full_batch_step_the_delta_is_the_gradient(engine: str) -> None:
    """Delta_k - Delta + (g + Delta - Delta_k) = g, in round 1, where h_k = 0 and w = w_t."""
    ran = hand.run("feddc", SETTINGS, engine=engine, rounds=1, epochs=1)
    for k, client in enumerate(hand.CLIENTS):
        wanted = hand.gradient(hand.W0, hand.X[client], hand.Y[client])
        hand.same({key: leaf[k] for key, leaf in ran.memory("feddc")["Delta"].items()}, wanted)


def test_four_models_travel(engine: str) -> None:
    """w and Delta down, w_k and the change of Delta_k up; h_k does not."""
    feddc, plain = (
        hand.run(recipe, engine=engine, rounds=2).outcome.rows for recipe in ("feddc", "fedavg")
    )
    for a, b in zip(feddc, plain, strict=True):
        assert (a["bytes_up"], a["bytes_down"]) == (2 * b["bytes_up"], 2 * b["bytes_down"])


def test_its_fixed_point_is_the_minimiser_of_the_mean_loss() -> None:
    wanted = convex.minimiser([1 / 3] * 3)
    found = convex.run("feddc", {"alpha": 0.3}, 30, epochs=3)
    assert convex.distance(found, wanted) < 1e-3 * convex.distance(convex.START, wanted)


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_optimisers_without_a_fixed_step_are_refused(optimizer: str) -> None:
    data = hand.samples(hand.X, hand.Y)
    with pytest.raises(RecipeError, match=rf"feddc.*{optimizer}.*allowed: sgd"):
        simulate(
            "feddc",
            {},
            Federation.of(data, list(hand.CLIENTS), data),
            Plan(
                hand.given(),
                LocalTraining(optimizer=optimizer, lr=0.1, epochs=1, batch_size=2),
                1,
                3,
                0,
            ),
        )


@pytest.mark.parametrize("other", ["scaffold", "fedprox", "feddyn", "fednnnn", "fednova"])
def test_a_second_correction_or_step_is_refused(other: str) -> None:
    with pytest.raises(RecipeError, match=r"can't be combined"):
        hand.run(f"feddc+{other}")
