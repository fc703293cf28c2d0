"""FNR-FL as its authors' code has it, and its regulariser with a gradient, against arithmetic by
hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fedml_noniid.core.component import Setting
from fedml_noniid.core.options import RecipeError
from fedml_noniid.core.trees import Params
from fedml_noniid.plugins import registry
from tests.methods import by_hand as hand
from tests.methods.conftest import engine as engine
from tests.methods.test_fnr import (
    REFINE,
    TEST_X,
    TEST_Y,
    feature_norms,
    order,
    worst,
)

PAPER: dict[str, Any] = {
    "public_data": "train_holdout",
    "fnr_reg": "published",
    "refine_optimizer": "same",
}


def authors(**options: Any) -> dict[str, dict[str, object]]:
    """Settings: the paper's readings but for some."""
    return {"fnr_authors": PAPER | options}


def by_authors(settings: dict[str, Any], engine: str, **options: Any) -> hand.Ran:
    """One round with the paper's readings but for these."""
    return hand.run("fnr_authors", authors(**settings), engine=engine, **{"rounds": 1} | options)


def squared(lam: float, mean: hand.Array) -> Callable[..., hand.Tree]:
    """The gradient of CE + lambda J, J = sum_c rho_c (mean_c - f_c)^2, through f_c = mean of
    ||h_b|| over class c: df_c/dh_b = h_b / (n_c ||h_b||), and 0 where h_b = 0.

    As rho_c = n_c / B, dJ/dh_b = -2 (mean - f)[y_b] / B * h_b / ||h_b||.
    """

    def direction(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
        h = hand.hidden(w, x)
        u = np.sqrt((h**2).sum(1))
        unit = h / np.where(u > 0, u, 1.0)[:, None]
        f = np.array([u[y == c].mean() if (y == c).any() else np.nan for c in (0, 1)])
        slope = -2 * (mean - f)[y]
        return hand.gradient(w, x, y, lam * (slope / len(y))[:, None] * unit)

    return direction


def test_the_live_regulariser_has_a_gradient(engine: str) -> None:
    """Two of three are refined, for two rounds; in batches of 3 and 1 a class may be absent (rho_c
    = 0)."""
    options = {"fnr_reg": "squared_live", "p": 0.7, "lam": 0.3, "epochs": 2, "batch_size": 3}
    ran = by_authors(options, engine, rounds=2)
    w = hand.W0
    for t in range(2):
        local = [hand.descend(w, [client] * 2) for client in hand.CLIENTS]
        norms = np.stack([feature_norms(w_i) for w_i in local])
        s_re = worst(local, 2)
        ask = ran.exchanges[2 * t + 1][0]
        assert list(ask.to) == s_re
        for row, j in enumerate(s_re):
            others = [m for m in range(3) if m not in s_re]
            mean = norms[others].mean(0)
            np.testing.assert_allclose(ask.each["fnr_authors"]["mean"][row], mean, rtol=1e-10)
            step = squared(0.3, mean)
            batches = order(ran, j, t + 1)
            local[j] = hand.descend(local[j], batches, step, x=hand.PUBLIC_X, y=hand.PUBLIC_Y)
        w = hand.average(np.array(hand.SIZES) / 6, local)
    hand.same(ran.outcome.params, w, rtol=1e-9)


def weights(engine: str, **settings: object) -> Params:
    return by_authors(REFINE | settings, engine, rounds=2).outcome.params


def test_with_the_papers_readings_it_is_the_paper(engine: str) -> None:
    """But for rounding: the two draw the order of D_public with keys of their own."""
    paper = hand.run("fnr", {"fnr": REFINE}).outcome.params
    hand.same(weights(engine), hand.arrays(paper))


@pytest.mark.parametrize(
    ("reading", "same"),
    [
        ({"fnr_reg": "published", "lam": 1000.0}, True),
        ({"fnr_reg": "squared_live", "lam": 0.0}, True),
        ({"fnr_reg": "squared_live", "lam": 0.1}, False),
        ({"fnr_reg": "squared_live", "p": 1.0}, True),  # nobody to compare with
    ],
    ids=str,
)
def test_what_changes_the_weights(reading: dict[str, Any], same: bool, engine: str) -> None:
    """The control: without J, "off", the published method's weights are the same to the bit."""
    off = weights(engine, **reading | {"fnr_reg": "off"})
    with_j = weights(engine, **reading)
    assert all(torch.equal(with_j[key], leaf) for key, leaf in off.items()) is same


@pytest.mark.parametrize(
    ("fnr_reg", "p", "numbers"),
    [("published", 0.7, 2), ("squared_live", 0.7, 2), ("off", 0.7, 0), ("squared_live", 1.0, 0)],
)
def test_only_what_a_reading_needs_is_sent(fnr_reg: str, p: float, numbers: int) -> None:
    """Float64: down M = 12 numbers to three, and to the refined C or nothing; up M + C + 1, and M
    again."""
    ran = by_authors(REFINE | {"fnr_reg": fnr_reg, "p": p}, "sequential")
    (row,), n_re = ran.outcome.rows, round(3 * p - 0.1)
    assert (row["bytes_down"], row["bytes_up"]) == (
        8 * (3 * 12 + n_re * numbers),
        8 * (3 * (12 + 3) + n_re * 12),
    )


def test_phase_2_with_adam(engine: str) -> None:
    """Kingma and Ba 2015 with the local rate and decay, from m = v = 0 in every refinement; phase 1
    stays SGD."""
    lr, decay = 0.05, 0.1
    settings = authors(p=0.5, epochs=3, batch_size=8, refine_optimizer="adam")
    ran = hand.run("fnr_authors", settings, engine=engine, lr=lr, weight_decay=decay)

    def direction(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
        return hand.each(lambda g, w: g + decay * w, hand.gradient(w, x, y), w)

    w = hand.W0
    for _ in range(2):
        local = [hand.descend(w, [client] * 2, direction, lr=lr) for client in hand.CLIENTS]
        (j,) = worst(local, 1)
        optimizer = hand.Adam(local[j])
        for _ in range(3):
            g = direction(local[j], hand.PUBLIC_X, hand.PUBLIC_Y)
            local[j] = optimizer.step(local[j], g, lr)
        w = hand.average(np.array(hand.SIZES) / 6, local)
    hand.same(ran.outcome.params, w, rtol=1e-9)


@pytest.mark.parametrize("recipe", ["fnr_authors", "datasharing+fnr_authors", "feddf+fnr_authors"])
def test_the_test_set_stands_for_the_public_split_of_all(recipe: str) -> None:
    """No public split is needed, and the leak is said."""
    assert registry.build(recipe, {}, Setting(3, 3)).leak == "fnr_authors trains on the test set"
    with pytest.raises(RecipeError, match=r"needs a public split, but public is 0"):
        registry.build(recipe, authors(), Setting(3, 3))


@pytest.mark.parametrize("public_data", ["train_holdout", "test"])
def test_d_public_may_be_the_test_set(public_data: str, engine: str) -> None:
    """A_i, F_i and phase 2 on the one or the other, and the leak is said."""
    of = hand.federation(test=hand.samples(TEST_X, TEST_Y))
    ran = by_authors(REFINE | {"public_data": public_data}, engine, of=of)
    x, y = (TEST_X, TEST_Y) if public_data == "test" else (hand.PUBLIC_X, hand.PUBLIC_Y)
    local = [hand.descend(hand.W0, [client] * 2) for client in hand.CLIENTS]
    scores = [hand.accuracy(w_i, x, y) for w_i in local]
    u = np.sqrt((hand.hidden(local[2], x) ** 2).sum(1))
    upload = ran.exchanges[0][1].upload["fnr_authors"]
    np.testing.assert_allclose(upload["A"], scores, rtol=1e-12)
    np.testing.assert_allclose(upload["F"][2], [u[y == 0].mean(), u[y == 1].mean()], rtol=1e-10)
    j = scores.index(min(scores))
    local[j] = hand.descend(local[j], [np.arange(len(y))] * 3, x=x, y=y)
    hand.same(ran.outcome.params, hand.average(np.array(hand.SIZES) / 6, local))
    leak = ran.simulation.algorithm.leak
    assert leak == ("fnr_authors trains on the test set" if public_data == "test" else "")
