"""CCN (Kundalwal et al. 2024), eqs. 3-8 and algorithm 1, against arithmetic by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from plugins.ccn.algorithm import CCN
from plugins.core.component import RecipeError, Setting
from plugins.engines.simulation import draw_cohort
from tests.methods import by_hand as hand

T = 0.5


def contribution(z: hand.Array, temperature: float) -> hand.Array:
    """Eqs. 3-5 with the temperature of eq. 8, as they are printed: two sums of exponentials."""
    n = len(z)
    s = np.eye(n)
    for r in range(n):
        for p in range(n):
            if r != p:
                s[r, p] = z[r] @ z[p] / (np.linalg.norm(z[r]) * np.linalg.norm(z[p]))  # eqs. 3-4
    powers = np.exp(s.sum(1) / temperature)
    return np.array([sum(powers[q] for q in range(n) if q != r) / powers.sum() for r in range(n)])  # eq. 5


def found(z: hand.Array, temperature: float = T) -> hand.Array:
    return np.asarray(CCN(T=temperature).contribution(torch.tensor(z, dtype=torch.float64)).numpy())


def test_two_rounds_weighted_by_contribution_and_samples(engine: str) -> None:
    """z_r under the updated model; w = sum_r Lambda_r nu_r / (Lambda . nu) w_r with nu_r = n_r/n (eq. 7)."""
    ran = hand.run("ccn", {"ccn": {"T": T}}, engine=engine)
    w = hand.W0
    for t in range(2):
        local = [hand.descend(w, [client] * 2) for client in hand.CLIENTS]
        z = np.stack([hand.hidden(w_r, hand.X[c]).mean(0) for w_r, c in zip(local, hand.CLIENTS, strict=True)])
        np.testing.assert_allclose(ran.exchanges[t][1].upload["ccn"]["z"], z, rtol=1e-10)
        product = contribution(z, T) * np.array(hand.SIZES) / 6
        assert np.ptp(contribution(z, T)) > 0.01, "the example tells clients apart"
        w = hand.average(product / product.sum(), local)
    hand.same(ran.outcome.params, w)


def test_r_are_the_clients_of_the_round(engine: str) -> None:
    ran = hand.run("ccn", {"ccn": {"T": T}}, engine=engine, cohort=2, rounds=2)
    w = hand.W0
    for t in (1, 2):
        cohort = draw_cohort(0, t, 3, 2)
        local = [hand.descend(w, [hand.CLIENTS[k]] * 2) for k in cohort]
        n = np.array([hand.SIZES[k] for k in cohort])
        w = hand.average(n / n.sum(), local)  # the similarity of two is mutual, so Lambda = (1/2, 1/2)
    hand.same(ran.outcome.params, w)


def test_scaffolds_model_step_is_weighted_and_its_control_variates_are_not(engine: str) -> None:
    """nu_r = 1/m; c <- c + (|S|/N) mean of dc_i. First round, c = c_i = 0."""
    ran = hand.run("scaffold+ccn", {"ccn": {"T": T}}, engine=engine, rounds=1)
    local = [hand.descend(hand.W0, [client] * 2) for client in hand.CLIENTS]
    z = np.stack([hand.hidden(w_r, hand.X[c]).mean(0) for w_r, c in zip(local, hand.CLIENTS, strict=True)])
    lam = contribution(z, T)
    hand.same(ran.outcome.params, hand.average(lam / lam.sum(), local))
    dc = [hand.each(lambda x, y: (x - y) / (2 * hand.LR), hand.W0, y) for y in local]
    hand.same(ran.state("scaffold")["c"], hand.average([1 / 3] * 3, dc))


def test_the_contribution_in_numbers() -> None:
    """Axes x, x, y: row sums 2, 2, 1; with T = 1, Lambda_3 = 2 e^2 / (2 e^2 + e) = 2e / (2e + 1)."""
    lam = found(np.array([[2.0, 0.0], [5.0, 0.0], [0.0, 3.0]]), 1.0)
    e = math.e
    np.testing.assert_allclose(lam, [(e + 1) / (2 * e + 1), (e + 1) / (2 * e + 1), 2 * e / (2 * e + 1)], rtol=1e-14)
    assert lam[2] > lam[0], "the client that differs counts for more"


@pytest.mark.parametrize("temperature", [0.25, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("n", [2, 3, 10, 40])
def test_eq_5_and_eq_8_agree_and_sum_to_r_minus_one(n: int, temperature: float) -> None:
    z = np.random.default_rng(n).random((n, 5))
    lam = found(z, temperature)
    np.testing.assert_allclose(lam, contribution(z, temperature), rtol=1e-10)
    assert lam.sum() == pytest.approx(n - 1, rel=1e-12)
    assert (lam >= 0).all()
    assert (lam <= 1).all()


def test_a_high_temperature_makes_everybody_equal() -> None:
    """T -> infinity: Lambda_r = 1 - 1/R."""
    np.testing.assert_allclose(found(np.random.default_rng(0).random((5, 3)), 1e9), [0.8] * 5, rtol=1e-8)


@pytest.mark.parametrize("temperature", [0.5, 0.01])
def test_a_hundred_identical_clients_do_not_overflow(temperature: float) -> None:
    """Row sums reach R/T = 10,000, whose exponential no float64 holds."""
    np.testing.assert_allclose(found(np.ones((100, 4)), temperature), [0.99] * 100, rtol=1e-10)


def test_a_low_temperature_silences_only_the_most_central_client() -> None:
    """T -> 0: the largest row sum takes the whole softmax."""
    z = np.array([[1.0, 0.0], [1.0, 0.2], [0.0, 1.0]])
    np.testing.assert_allclose(found(z, 1e-4), [1.0, 0.0, 1.0], atol=1e-12)


def test_a_zero_representation_resembles_nobody() -> None:
    """Cosine 0 with everybody, 1 with itself: row sums 2, 2, 1 as for an orthogonal client."""
    np.testing.assert_allclose(
        found(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]])),
        found(np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])),
        rtol=1e-14,
    )
    np.testing.assert_allclose(found(np.zeros((4, 2))), [0.75] * 4, rtol=1e-14)


def test_a_single_client_keeps_its_weight(engine: str) -> None:
    """R = 1: sum Lambda = 0 would be 0/0."""
    ran = hand.run("ccn", engine=engine, cohort=1)
    plain = hand.run("fedavg", engine=engine, cohort=1)
    assert all(torch.equal(ran.outcome.params[key], plain.outcome.params[key]) for key in plain.outcome.params)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_that_is_not_positive_is_refused(temperature: float) -> None:
    with pytest.raises(RecipeError, match="T = "):
        CCN(T=temperature).check(Setting(3, 3, 2, 2, "sgd", 0.1, 0))
