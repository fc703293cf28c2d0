"""SGDM (Liu et al. 2020) and the two other things of that name, against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.core.options import RecipeError
from fedml_noniid.plugins.engines.cohort import draw_cohort
from fedml_noniid.plugins.engines.federation import Federation
from fedml_noniid.plugins.engines.plan import LocalTraining, Plan
from fedml_noniid.plugins.engines.simulation import Simulation
from fedml_noniid.plugins.simulate import simulate
from tests import federation
from tests.methods import by_hand as hand

GAMMA = 0.7
THREE = pytest.mark.parametrize("form", ["sgdm", "sgdm_local", "sgdm_server"])


def settings(form: str = "sgdm", gamma: float = GAMMA) -> dict[str, dict[str, object]]:
    return {form: {"gamma": gamma}}


class Reference:
    """The server of each form."""

    def __init__(self, form: str, decay: float = 0.0) -> None:
        self.form, self.decay = form, decay
        self.w, self.v, self.d = hand.W0, hand.zeros(), hand.zeros()

    def local(self, batches: Sequence[hand.Array]) -> tuple[hand.Tree, hand.Tree]:
        """(w_k, v_k)."""
        gamma = 0.0 if self.form == "sgdm_server" else GAMMA
        w, v = self.w, self.v if self.form == "sgdm" else hand.zeros()
        for batch in batches:
            g = hand.gradient(w, hand.X[batch], hand.Y[batch])
            v = hand.each(lambda v, g, w: gamma * v + g + self.decay * w, v, g, w)
            w = hand.each(lambda w, v: w - hand.LR * v, w, v)
        return w, v

    def round(self, cohort: Sequence[int], batches: Sequence[list[hand.Array]]) -> None:
        found = [self.local(of) for of in batches]
        n = np.array([hand.SIZES[k] for k in cohort], dtype=float)
        average = hand.average(n / n.sum(), [w for w, _ in found])
        if self.form == "sgdm":
            self.v = hand.average(n / n.sum(), [v for _, v in found])
        if self.form == "sgdm_server":
            self.d = hand.each(lambda d, new, w: GAMMA * d + (new - w), self.d, average, self.w)
            average = hand.each(np.add, self.w, self.d)
        self.w = average


@THREE
def test_three_rounds_of_everybody(engine: str, form: str) -> None:
    ran, reference = hand.run(form, settings(form), engine=engine, rounds=3), Reference(form)
    for _ in range(3):
        reference.round((0, 1, 2), [[client] * 2 for client in hand.CLIENTS])
    hand.same(ran.outcome.params, reference.w)
    if form == "sgdm":
        hand.same(ran.state("sgdm")["v"], reference.v)
    if form == "sgdm_server":
        hand.same(ran.state(form)["d"], reference.d)


@THREE
def test_partial_participation_and_unequal_numbers_of_steps(engine: str, form: str) -> None:
    """Batches of 1: 2, 4, 6 steps.

    The clients that are drawn start from the v of the cohort before.
    """
    ran = hand.run(form, settings(form), engine=engine, rounds=4, cohort=2, batch_size=1)
    reference = Reference(form)
    for t in range(1, 5):
        cohort = draw_cohort(0, t, 3, 2)
        if form == "sgdm":
            hand.same(ran.exchanges[t - 1][0].shared["sgdm"]["v"], reference.v)
        reference.round(cohort, [ran.batches(k, t) for k in cohort])
    hand.same(ran.outcome.params, reference.w)


@THREE
def test_weight_decay_stays(engine: str, form: str) -> None:
    """It is part of g, as in torch."""
    ran = hand.run(form, settings(form), engine=engine, weight_decay=0.1)
    reference = Reference(form, decay=0.1)
    for _ in range(2):
        reference.round((0, 1, 2), [[client] * 2 for client in hand.CLIENTS])
    hand.same(ran.outcome.params, reference.w)


def test_the_first_round_of_mfl_is_that_of_local(engine: str) -> None:
    """v = 0 in the beginning."""
    mfl, local = (
        hand.run(form, settings(form), engine=engine, rounds=1).outcome.params
        for form in ("sgdm", "sgdm_local")
    )
    assert all(torch.equal(mfl[key], local[key]) for key in mfl)


def test_with_one_client_a_round_mfl_is_one_long_run_of_sgd_with_momentum(engine: str) -> None:
    """w and v are handed from client to client: 3 rounds of 2 steps are 6 steps in a row."""
    ran = hand.run("sgdm", settings(), engine=engine, rounds=3, cohort=1)
    steps = [hand.CLIENTS[draw_cohort(0, t, 3, 1)[0]] for t in (1, 2, 3) for _ in range(2)]
    hand.same(ran.outcome.params, Reference("sgdm_local").local(steps)[0])


def test_the_clients_weights_reach_w_and_v(engine: str) -> None:
    """With CCN: c_r = Lambda_r nu_r / (Lambda . nu), Lambda = 1 - softmax(sum of cosines / T)."""
    ran = hand.run("ccn+sgdm", settings() | {"ccn": {"T": 0.2}}, engine=engine, rounds=1)
    local = [{key: leaf[k].numpy() for key, leaf in ran.trained(0).items()} for k in range(3)]
    z = np.array(
        [
            hand.hidden(w, hand.X[client]).mean(0)
            for w, client in zip(local, hand.CLIENTS, strict=True)
        ]
    )
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    product = (1 - hand.softmax((z @ z.T).sum(1)[None] / 0.2)[0]) * np.array(hand.SIZES)
    c = product / product.sum()
    assert abs(c - np.array(hand.SIZES) / 6).max() > 0.01
    found = [Reference("sgdm").local([client] * 2) for client in hand.CLIENTS]
    hand.same(ran.outcome.params, hand.average(c, [w for w, _ in found]))
    hand.same(ran.state("sgdm")["v"], hand.average(c, [v for _, v in found]))


def test_a_refinement_leaves_the_averaged_v_alone() -> None:
    refined = hand.run("fnr+sgdm", settings() | {"fnr": {"p": 1.0, "epochs": 1}}, rounds=1)
    plain = hand.run("sgdm", settings(), rounds=1)
    assert not torch.equal(refined.outcome.params["fc1.bias"], plain.outcome.params["fc1.bias"])
    for key, v in plain.state("sgdm")["v"].items():
        assert torch.equal(refined.state("sgdm")["v"][key], v)


def test_the_ball_rolls_on_with_what_others_leave() -> None:
    """w_{t+1} - w_t = gamma (w_t - w_{t-1}) + u, with CCN's u = sum c_k (w_k - w_t)."""
    ran = hand.run("ccn+sgdm_server", settings("sgdm_server") | {"ccn": {"T": 0.2}}, rounds=3)
    w = [{key: leaf.numpy() for key, leaf in ask.params.items()} for ask, _ in ran.exchanges]
    c = ran.outcome.tensors["ccn/weights"][2].numpy()
    assert abs(c - np.array(hand.SIZES) / 6).max() > 0.01
    d = hand.each(np.subtract, w[2], w[1])
    u = {key: np.tensordot(c, leaf.numpy(), 1) for key, leaf in ran.exchanges[2][1].deltas.items()}
    hand.same(ran.outcome.params, hand.each(lambda w, d, u: w + GAMMA * d + u, w[2], d, u))


@THREE
def test_without_gamma_it_is_fedavg_to_the_bit(engine: str, form: str) -> None:
    found = hand.run(form, settings(form, 0.0), engine=engine, rounds=3).outcome
    plain = hand.run("fedavg", engine=engine, rounds=3).outcome
    assert all(torch.equal(found.params[key], leaf) for key, leaf in plain.params.items())
    assert [row["bytes_up"] for row in found.rows] == [row["bytes_up"] for row in plain.rows]


@pytest.mark.parametrize(("form", "vectors"), [("sgdm", 1), ("sgdm_local", 0), ("sgdm_server", 0)])
@pytest.mark.parametrize("batch_norm", [False, True])
def test_sgdm_moves_four_models_the_others_two(form: str, vectors: int, batch_norm: bool) -> None:
    """53 floats; batch norm adds 10 and 10 buffers, of which v has none."""
    model, params = (73, 63) if batch_norm else (53, 53)
    wanted = 4 * 4 * (model + vectors * params)
    for row in federation.run(form, settings(form), batch_norm=batch_norm).rows:
        assert (row["bytes_up"], row["bytes_down"]) == (wanted, wanted)


def simulated(form: str, local: LocalTraining) -> Simulation:
    data = hand.samples(hand.X, hand.Y)
    return simulate(
        form,
        settings(form),
        Federation.of(data, list(hand.CLIENTS), data),
        Plan(hand.given(), local, 1, 3, 0),
    )


@pytest.mark.parametrize("optimizer", ["adam", "rmsprop"])
def test_other_optimisers_are_for_the_server_form_only(optimizer: str) -> None:
    local = LocalTraining(optimizer=optimizer, lr=0.1, epochs=1, batch_size=2)
    for form in ("sgdm", "sgdm_local"):
        with pytest.raises(
            RecipeError, match=rf"{form}: is SGD with momentum, got optimizer = '{optimizer}'"
        ):
            simulated(form, local)
    simulated("sgdm_server", local).run()


def test_another_local_momentum_is_refused_not_replaced() -> None:
    for form in ("sgdm", "sgdm_local"):
        with pytest.raises(RecipeError, match=rf"{form}: momentum = 0.5 and {form}.gamma = 0.7"):
            simulated(form, LocalTraining(lr=0.1, epochs=1, batch_size=2, momentum=0.5))
        simulated(form, LocalTraining(lr=0.1, epochs=1, batch_size=2, momentum=GAMMA))
    simulated("sgdm_server", LocalTraining(lr=0.1, epochs=1, batch_size=2, momentum=0.5))


def test_only_one_says_how_far_the_server_moves() -> None:
    for other in ("fednnnn", "feddyn"):
        with pytest.raises(RecipeError, match="server step"):
            hand.run(f"{other}+sgdm_server")
    with pytest.raises(RecipeError, match="server step"):
        hand.run("scaffold+sgdm_server", {"scaffold": {"server_lr": 0.6}})
    hand.run("fednnnn+sgdm_local", rounds=1)


def test_only_one_brings_the_local_optimiser() -> None:
    with pytest.raises(RecipeError, match="local optimiser"):
        hand.run("sgdm+sgdm_local")
    hand.run("sgdm+sgdm_server", rounds=1)
