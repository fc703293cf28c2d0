"""CCN (Kundalwal et al. 2024), eqs. 3-8 and algorithm 1, against arithmetic by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.ccn.algorithm import CCN
from tests.methods import by_hand as hand
from tests.methods import test_sgdm
from tests.methods.test_fednova import combined

T = 0.5
SIZES = np.array(hand.SIZES)


def similarity(z: hand.Array) -> hand.Array:
    """Eqs. 3-4; a zero vector has cosine 0 with every other one."""
    length = np.linalg.norm(z, axis=1)
    s = z @ z.T / np.where(length > 0, length, 1) / np.where(length > 0, length, 1)[:, None]
    np.fill_diagonal(s, 1)
    return np.asarray(s)


def contribution(z: hand.Array, temperature: float) -> hand.Array:
    """Eq. 5 with the temperature of eq. 8, as they are printed: two sums of exponentials."""
    powers = np.exp(similarity(z).sum(1) / temperature)
    return np.array(
        [sum(s for q, s in enumerate(powers) if q != r) / powers.sum() for r in range(len(z))]
    )


def weights(z: hand.Array, nu: hand.Array = SIZES / 6, temperature: float = T) -> hand.Array:
    """Eq. 7: Lambda_r nu_r / (Lambda . nu)."""
    product = contribution(z, temperature) * nu
    return np.asarray(product / product.sum())


def found(z: hand.Array, temperature: float = T) -> hand.Array:
    return np.asarray(CCN(T=temperature).contribution(torch.tensor(z, dtype=torch.float64)).numpy())


def trained(w: hand.Tree) -> list[hand.Tree]:
    """Everybody's local model after two epochs of full batches."""
    return [hand.descend(w, [client] * 2) for client in hand.CLIENTS]


def means(models: Sequence[hand.Tree]) -> hand.Array:
    """z_r over all samples of client r, [3, 2]."""
    return np.stack(
        [
            hand.hidden(w, hand.X[client]).mean(0)
            for w, client in zip(models, hand.CLIENTS, strict=True)
        ]
    )


def test_two_rounds(engine: str) -> None:
    """w = sum_r Lambda_r nu_r / (Lambda . nu) w_r (eq. 7), z_r under the updated model."""
    ran = hand.run("ccn", {"ccn": {"T": T}}, engine=engine)
    w, base, tensors = hand.W0, SIZES / 6, ran.outcome.tensors
    for t, row in enumerate(ran.outcome.rows):
        local = trained(w)
        z = means(local)
        np.testing.assert_allclose(ran.exchanges[t][1].upload["ccn"]["z"], z, rtol=1e-10)
        lam = contribution(z, T)
        assert np.ptp(lam) > 0.01, "the example tells clients apart"
        c = lam * base / (lam @ base)
        for key, value in (("S", similarity(z)), ("Lambda", lam), ("weights", c)):
            np.testing.assert_allclose(tensors[f"ccn/{key}"][t], value, rtol=1e-10)
        moved = abs(c - base).sum() / 2
        columns = {
            "lambda_min": lam.min(),
            "lambda_max": lam.max(),
            "weight_over_nu_min": (c / base).min(),
            "weight_over_nu_max": (c / base).max(),
            "moved": moved,
            "moved_most": base.max(),
            "moved_part": moved / base.max(),
        }
        for column, value in columns.items():
            assert row[f"ccn_{column}"] == pytest.approx(value, rel=1e-10), column
        w = hand.average(c, local)
    hand.same(ran.outcome.params, w)


def test_a_batch_norm_uses_the_statistics_that_training_left(engine: str) -> None:
    ran = hand.run("ccn", {"ccn": {"T": T}}, engine=engine, network=hand.with_norm())
    for t, (_, reply) in enumerate(ran.exchanges):
        for k, client in enumerate(hand.CLIENTS):
            h = hand.normalised(hand.row(ran.trained(t) | reply.buffers, k), hand.X[client])
            np.testing.assert_allclose(reply.upload["ccn"]["z"][k], h.mean(0), rtol=1e-10)


def test_r_are_the_clients_of_the_round(engine: str) -> None:
    """The similarity of two is mutual, so Lambda = (1/2, 1/2): FedAvg."""
    ran = hand.run("ccn", {"ccn": {"T": T}}, engine=engine, cohort=2)
    hand.same(ran.outcome.params, ran.federated(lambda w, _, batches: hand.descend(w, batches)))


# Meeting others
# --------------------------------------------------------------------------------------------------


def test_sgdm_averages_model_and_momentum_with_the_same_weights(engine: str) -> None:
    """Two rounds: v <- gamma v + g, w <- w - eta v; the server sends sum c_r w_r and sum c_r
    v_r."""
    settings = {"ccn": {"T": T}, "sgdm": {"gamma": test_sgdm.GAMMA}}
    ran, reference = hand.run("sgdm+ccn", settings, engine=engine), test_sgdm.Reference("sgdm")
    for _, _, batches in ran.rounds():
        local, momenta = zip(*(reference.local(of) for of in batches), strict=True)
        c = weights(means(local))
        reference.w, reference.v = hand.average(c, local), hand.average(c, momenta)
    hand.same(ran.outcome.params, reference.w)
    hand.same(ran.state("sgdm")["v"], reference.v)


def stretched(c: hand.Array, local: Sequence[hand.Tree]) -> hand.Tree:
    """FedNNNN's w + beta (E / N) u, with u and E of CCN's weights."""
    deltas = [hand.each(np.subtract, w_k, hand.W0) for w_k in local]
    u = hand.average(c, deltas)
    by = 0.9 * float(c @ [*map(hand.length, deltas)]) / hand.length(u)
    return hand.each(lambda w, u: w + by * u, hand.W0, u)


def with_h(c: hand.Array, local: Sequence[hand.Tree]) -> hand.Tree:
    """FedDyn's mean minus h / alpha, whose h is that of uniform weights."""
    moved = [hand.each(np.subtract, w_k, hand.W0) for w_k in local]
    return hand.each(np.add, hand.average(c, local), hand.average(UNIFORM, moved))


UNIFORM, A = np.full(3, 1 / 3), np.full(3, 2.0)
# The method's own weights, its options, and the model after round 1, of CCN's weights
OTHERS: dict[str, tuple[hand.Array, dict[str, object], Callable[..., hand.Tree]]] = {
    "scaffold": (UNIFORM, {}, hand.average),
    "fednnnn": (UNIFORM, {"beta": 0.9}, stretched),
    "feddyn": (UNIFORM, {}, with_h),
    "fednova": (SIZES / 6, {}, lambda c, local: combined(hand.W0, local, c, A, A, "direction")),
}


@pytest.mark.parametrize("other", OTHERS)
def test_others_take_its_weights(engine: str, other: str) -> None:
    nu, options, after = OTHERS[other]
    ran = hand.run(f"ccn+{other}", {"ccn": {"T": T}, other: options}, engine=engine, rounds=1)
    local = ran.local(0)
    hand.same(ran.outcome.params, after(weights(means(local), nu), local))


# The contribution
# --------------------------------------------------------------------------------------------------


E = math.e
CENTRAL = [[1.0, 0.0], [1.0, 0.2], [0.0, 1.0]]
CONTRIBUTIONS: list[tuple[Any, float, list[float]]] = [
    # Axes x, x, y: row sums 2, 2, 1, so Lambda_3 = 2 e^2 / (2 e^2 + e): it counts for more.
    ([[2, 0], [5, 0], [0, 3]], 1.0, [(E + 1) / (2 * E + 1)] * 2 + [2 * E / (2 * E + 1)]),
    # A zero vector has cosine 0 with everybody, 1 with itself: as an orthogonal client.
    ([[2, 0], [5, 0], [0, 0]], 1.0, [(E + 1) / (2 * E + 1)] * 2 + [2 * E / (2 * E + 1)]),
    (np.zeros((4, 2)), T, [0.75] * 4),
    # Opposite vectors: row sums 0, 0, 1.
    ([[1, 0], [-2, 0], [0, 3]], 1.0, [(1 + E) / (2 + E)] * 2 + [2 / (2 + E)]),
    # T -> infinity: 1 - 1/R. T -> 0: the largest row sum takes the whole softmax.
    (np.random.default_rng(0).random((5, 3)), 1e9, [0.8] * 5),
    (CENTRAL, 1e-4, [1.0, 0.0, 1.0]),
    # Identical clients: row sums reach R/T = 10,000, whose exponential no float64 holds.
    *((np.ones((100, 4)), temperature, [0.99] * 100) for temperature in (0.5, 0.01)),
]


@pytest.mark.parametrize(("z", "temperature", "wanted"), CONTRIBUTIONS)
def test_the_contribution_in_numbers(z: Any, temperature: float, wanted: list[float]) -> None:
    lam = found(np.asarray(z, dtype=float), temperature)
    np.testing.assert_allclose(lam, wanted, rtol=1e-8, atol=1e-12)


def test_a_single_client_keeps_its_weight(engine: str) -> None:
    """R = 1: sum Lambda = 0 would be 0/0."""
    ran = hand.run("ccn", engine=engine, cohort=1)
    assert hand.identical(ran, hand.run("fedavg", engine=engine, cohort=1))
    assert [row["ccn_weight_over_nu_max"] for row in ran.outcome.rows] == [1.0, 1.0]
    assert [row["ccn_moved"] for row in ran.outcome.rows] == [0.0, 0.0]
