"""FedDyn (Acar et al. 2021), algorithm 1, against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.baselines.feddyn_authors import FedDynAuthors
from fedml_noniid.plugins.core.component import Reply, Server
from fedml_noniid.plugins.core.optimizers import SGD
from fedml_noniid.plugins.core.options import RecipeError
from fedml_noniid.plugins.core.task import Task
from fedml_noniid.plugins.engines.cohort import draw_cohort
from fedml_noniid.plugins.engines.federation import Federation
from fedml_noniid.plugins.engines.plan import LocalTraining, Plan
from fedml_noniid.plugins.simulate import simulate
from tests import federation
from tests.methods import by_hand as hand
from tests.methods import convex

ALPHA = 0.3
EVERYBODY = (0, 1, 2)
PLAIN: dict[str, dict[str, object]] = {"feddyn": {"alpha": ALPHA}}
ADAPTED: dict[str, dict[str, object]] = {"feddyn_authors": {"alpha": ALPHA, "clip": 0.0}}
BOTH = pytest.mark.parametrize(
    "settings", [PLAIN, ADAPTED], ids=lambda settings: next(iter(settings))
)


def clipped(clip: float) -> dict[str, dict[str, object]]:
    return {"feddyn_authors": {"alpha": ALPHA, "alpha_adapt": "off", "clip": clip}}


def start(settings: dict[str, dict[str, object]], **options: Any) -> hand.Ran:
    return hand.run(next(iter(settings)), settings, **options)


class Reference:
    """Algorithm 1; `alpha` is the client's own in the authors' form."""

    def __init__(self, adapt: bool = False, clip: float = np.inf) -> None:
        self.w, self.h, self.lr = hand.W0, hand.zeros(), hand.LR
        self.g = [hand.zeros() for _ in hand.CLIENTS]
        n = np.array(hand.SIZES)
        self.alpha = ALPHA / (n / n.mean()) if adapt else np.full(3, ALPHA)
        self.clip, self.clipped = clip, 0

    def local(self, k: int, batches: list[hand.Array]) -> hand.Tree:
        alpha, g_k, w_t = self.alpha[k], self.g[k], self.w

        def direction(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
            g = hand.each(
                lambda g, g_k, w, w_t: g - g_k + alpha * (w - w_t),
                hand.gradient(w, x, y),
                g_k,
                w,
                w_t,
            )
            if hand.length(g) + 1e-6 <= self.clip:
                return g
            self.clipped += 1
            factor = self.clip / (hand.length(g) + 1e-6)  # as torch's clip_grad_norm_
            return hand.each(lambda leaf: factor * leaf, g)

        return hand.descend(w_t, batches, direction, self.lr)

    def round(self, cohort: tuple[int, ...], batches: list[list[hand.Array]]) -> None:
        w_t, local = self.w, [self.local(k, of) for k, of in zip(cohort, batches, strict=True)]
        for k, w_k in zip(cohort, local, strict=True):
            alpha_k = self.alpha[k]
            self.g[k] = hand.each(
                lambda g, w_k, w_t, a=alpha_k: g - a * (w_k - w_t), self.g[k], w_k, w_t
            )
            self.h = hand.each(
                lambda h, w_k, w_t: h - ALPHA / 3 * (w_k - w_t), self.h, w_k, w_t
            )  # 1/N, N all
        mean = hand.average([1 / len(cohort)] * len(cohort), local)
        self.w = hand.each(lambda m, h: m - h / ALPHA, mean, self.h)


def compare(ran: hand.Ran, reference: Reference) -> None:
    (name,) = ran.server.slices
    hand.same(ran.outcome.params, reference.w)
    hand.same(ran.state(name)["h"], reference.h)
    for k in EVERYBODY:
        hand.same({key: leaf[k] for key, leaf in ran.memory(name)["g"].items()}, reference.g[k])


@BOTH
def test_three_rounds_of_everybody(engine: str, settings: dict[str, dict[str, object]]) -> None:
    ran, reference = start(settings, engine=engine, rounds=3), Reference(settings is ADAPTED)
    for _ in range(3):
        reference.round(EVERYBODY, [[client] * 2 for client in hand.CLIENTS])
    compare(ran, reference)


@BOTH
def test_partial_participation_and_unequal_numbers_of_steps(
    engine: str, settings: dict[str, dict[str, object]]
) -> None:
    """Batches of 1: 2, 4, 6 steps.

    Clients that are not drawn keep g_k; the mean is over S, h moves by 1/N.
    """
    ran = start(settings, engine=engine, rounds=4, cohort=2, batch_size=1)
    reference = Reference(settings is ADAPTED)
    for t in range(1, 5):
        cohort = draw_cohort(0, t, 3, 2)
        reference.round(cohort, [ran.batches(k, t) for k in cohort])
    compare(ran, reference)


def test_the_corrected_gradient_is_clipped(engine: str) -> None:
    """To the norm over all parameters, and only where it is longer."""
    ran, reference = start(clipped(0.4), engine=engine, rounds=3), Reference(clip=0.4)
    for _ in range(3):
        reference.round(EVERYBODY, [[client] * 2 for client in hand.CLIENTS])
    assert 0 < reference.clipped < 18, "some steps are clipped, some are not"
    compare(ran, reference)


def test_a_clip_that_is_never_reached_changes_nothing(engine: str) -> None:
    ran, reference = start(clipped(1e6), engine=engine, rounds=3), Reference()
    for _ in range(3):
        reference.round(EVERYBODY, [[client] * 2 for client in hand.CLIENTS])
    compare(ran, reference)


def test_without_its_options_the_authors_form_is_the_papers(engine: str) -> None:
    a, b = (start(settings, engine=engine).outcome.params for settings in (clipped(0.0), PLAIN))
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_the_clip_bounds_the_whole_gradient_but_weight_decay(engine: str) -> None:
    """SGD adds decay w behind the clip. One step of round 1, where g_k = 0 and w = w_t."""
    ran = start(clipped(0.05), engine=engine, rounds=1, epochs=1, weight_decay=0.3)
    local = []
    for client in hand.CLIENTS:
        g = hand.gradient(hand.W0, hand.X[client], hand.Y[client])
        assert hand.length(g) > 0.05
        factor = 0.05 / (hand.length(g) + 1e-6)
        local.append(hand.each(lambda w, g, f=factor: w - hand.LR * (f * g + 0.3 * w), hand.W0, g))
    for key, leaf in ran.trained(0).items():
        np.testing.assert_allclose(
            leaf, np.stack([w_k[key] for w_k in local]), rtol=1e-10, atol=1e-13
        )


def test_a_gradient_of_zero_can_be_clipped(engine: str) -> None:
    """A client whose loss is at its minimum: no neuron is active and the logits are sure of its
    label."""
    sure = {key: np.zeros_like(leaf) for key, leaf in hand.W0.items()} | {
        "fc2.bias": np.array([900.0, -900.0])
    }
    network = hand.given(sure)
    outcome = start(clipped(1.0), engine=engine, network=network, rounds=1).outcome
    assert all(torch.isfinite(leaf).all() for leaf in outcome.params.values())


@pytest.mark.parametrize("cohort", [2, 3])
@pytest.mark.parametrize("recipe", ["feddyn", "feddyn+fnr"])
def test_h_is_the_mean_of_everybodys_g(engine: str, cohort: int, recipe: str) -> None:
    """Both lose alpha (w_k - w_t), divided by N in h: whoever takes part, and whatever a refinement
    does to w_k."""
    chosen = PLAIN | ({"fnr": {"p": 1.0, "epochs": 1, "batch_size": 2}} if "fnr" in recipe else {})
    ran = hand.run(recipe, chosen, engine=engine, rounds=4, cohort=cohort, batch_size=1)
    for key, h in ran.state("feddyn")["h"].items():
        assert h.abs().max() > 1e-3
        torch.testing.assert_close(
            h, ran.memory("feddyn")["g"][key].mean(0), rtol=1e-10, atol=1e-14
        )


def test_in_the_authors_form_the_mean_counts_samples() -> None:
    ran = start(ADAPTED, rounds=4, cohort=2, batch_size=1)
    p = torch.tensor(hand.SIZES, dtype=torch.float64) / 6
    for key, h in ran.state("feddyn_authors")["h"].items():
        mean = torch.tensordot(p, ran.memory("feddyn_authors")["g"][key], dims=1)
        torch.testing.assert_close(h, mean, rtol=1e-10, atol=1e-14)


def test_the_sizes_are_asked_for_once_and_cost_no_model(engine: str) -> None:
    """The exchange before round 1 carries round 1's model, so what is more is alpha_k, a number a
    round."""
    ran = start(ADAPTED, engine=engine, rounds=2)
    assert ran.jobs() == [
        ("feddyn_authors.count", EVERYBODY),
        ("train", EVERYBODY),
        ("train", EVERYBODY),
    ]
    np.testing.assert_allclose(
        ran.exchanges[1][0].each["feddyn_authors"]["alpha"], ALPHA * 2 / np.array([1, 2, 3])
    )
    plain = hand.run("fedavg", engine=engine, rounds=2).outcome.rows
    for a, b in zip(ran.outcome.rows, plain, strict=True):
        assert (a["bytes_up"], a["bytes_down"]) == (b["bytes_up"], b["bytes_down"] + 3 * 8)


def test_a_client_whose_answer_was_dropped_has_the_plain_alpha() -> None:
    """Clients 0 and 2 answer, n = 1 and 3 with mean 2: alpha_k = 2 alpha, alpha, 2/3 alpha."""
    method, w = FedDynAuthors(alpha=0.3), {"w": torch.zeros(2)}
    server = Server(Task(hand.given(), SGD(0.1)), w, {}, 0, 3, cohort=EVERYBODY)
    asks = method.survey(replace(server, state=method.init_server(server)))
    assert next(asks).to == EVERYBODY
    reply = Reply((0, 2), {}, {}, {}, torch.tensor([1, 3]), torch.zeros(2), torch.zeros(2))
    with pytest.raises(StopIteration) as stop:
        asks.send(reply)
    torch.testing.assert_close(stop.value.value.state["alpha"], torch.tensor([0.6, 0.3, 0.2]))


def test_with_equal_clients_the_forms_agree() -> None:
    equal = federation.federation(torch.float64, sizes=(5, 5, 5, 5))
    a, b = (
        federation.run(next(iter(settings)), settings, of=equal, dtype=torch.float64)
        for settings in (PLAIN, ADAPTED)
    )
    for key, leaf in a.params.items():
        torch.testing.assert_close(b.params[key], leaf, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("recipe", "p"),
    [("feddyn", [1 / 3] * 3), ("feddyn_authors", np.array(hand.SIZES) / 6)],
    ids=["paper", "authors"],
)
def test_its_fixed_point_is_the_minimiser(recipe: str, p: hand.Array) -> None:
    """Of the mean loss over clients, or in the authors' form over samples."""
    wanted = convex.minimiser(p)
    found = convex.run(recipe, {"alpha": 1.0}, 25, epochs=6)
    assert convex.distance(found, wanted) < 1e-3 * convex.distance(convex.START, wanted)


def test_fedavg_stops_elsewhere() -> None:
    """So what is converged to is the method's merit; and the two minimisers are apart."""
    found = convex.run("fedavg", {}, 15, epochs=6)
    clients, samples = convex.minimiser([1 / 3] * 3), convex.minimiser(np.array(hand.SIZES) / 6)
    assert min(convex.distance(found, clients), convex.distance(found, samples)) > 0.1
    assert convex.distance(clients, samples) > 0.1


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_other_optimisers_take_the_corrected_gradient(engine: str, optimizer: str) -> None:
    """Their first step from g_k = 0 is FedAvg's; g_k and h are made of models whatever made the
    steps."""
    data = hand.samples(hand.X, hand.Y)
    simulation = simulate(
        "feddyn",
        PLAIN,
        Federation.of(data, list(hand.CLIENTS), data),
        Plan(
            hand.given(),
            LocalTraining(optimizer=optimizer, lr=0.02, epochs=2, batch_size=2),
            3,
            2,
            0,
            engine=engine,
        ),
    )
    simulation.run()
    for key, h in simulation.loop.state.slices["feddyn"]["h"].items():
        mean = simulation.engine.clients.memory["feddyn"]["g"][key].mean(0)
        torch.testing.assert_close(h, mean, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("other", ["scaffold", "fedprox", "feddc", "fednnnn", "fednova"])
def test_a_second_correction_or_step_is_refused(other: str) -> None:
    with pytest.raises(RecipeError, match=r"can't be combined"):
        hand.run(f"feddyn+{other}")


def test_a_clip_is_part_of_the_local_optimiser() -> None:
    with pytest.raises(RecipeError, match="both own the local optimiser"):
        hand.run("feddyn_authors+sgdm_local")
    hand.run("feddyn_authors+sgdm_local", ADAPTED, rounds=1)
