"""Ditto (Li et al. 2021) against arithmetic by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests import federation
from tests.methods import by_hand as hand


@pytest.mark.parametrize("cohort", [3, 2])
def test_two_rounds(engine: str, cohort: int) -> None:
    """v <- v - eta (grad F_k(v) + lambda (v - w^t)), as many steps as w, which is FedAvg's.

    A client that misses a round keeps v.
    """
    ran = hand.run("ditto", {"ditto": {"lam": 0.7}}, engine=engine, cohort=cohort, batch_size=2)

    def local(w_t: hand.Tree, v: hand.Tree, k: int, batches: list[hand.Array]) -> Any:
        def pulled(v: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
            return hand.each(lambda g, v, w: g + 0.7 * (v - w), hand.gradient(v, x, y), v, w_t)

        return hand.descend(w_t, batches), hand.descend(v, batches, pulled)

    model, v = ran.kept(local, hand.W0)
    hand.same(ran.outcome.params, model)
    ran.tests(v)
    tests = (hand.PUBLIC_X, hand.PUBLIC_Y)
    row = ran.outcome.rows[-1]
    assert row["test_accuracy"] == np.mean([hand.accuracy(one, *tests) for one in v])
    assert row["test_loss"] == pytest.approx(np.mean([hand.loss(one, *tests) for one in v]))


def test_running_statistics_are_those_of_its_own_passes(engine: str) -> None:
    """With one client and lambda = 0 both models take the same steps."""
    of = federation.federation(torch.float64, sizes=(8,))
    settings = {"ditto": {"lam": 0.0}}
    ran = federation.run(
        "ditto", settings, data=of, cohort=1, engine=engine, dtype=torch.float64, batch_norm=True
    )
    for part, tree in (("params", ran.params), ("buffers", ran.buffers)):
        for name, leaf in tree.items():
            torch.testing.assert_close(ran.personal[part][name][0], leaf, rtol=1e-12, atol=1e-12)
    assert ran.buffers["bn1.mean"].abs().max() > 0


@pytest.mark.parametrize(
    ("recipe", "others", "engine"),
    [
        ("ditto", "", "sequential"),
        ("apfl", "+scaffold", "vectorized"),
        ("finetune", "", "vectorized"),
        ("fedrod", "+scaffold", "sequential"),
    ],
)
def test_the_global_model_is_that_of_the_recipe_without_it(
    recipe: str, others: str, engine: str
) -> None:
    """To the bit, with the same traffic; Fed-RoD's is FedAvg with the balanced softmax."""
    for batch_norm in (False, True):
        plain = federation.run(f"fedavg{others}", batch_norm=batch_norm, engine=engine)
        ran = federation.run(f"{recipe}{others}", batch_norm=batch_norm, engine=engine)
        assert federation.equal_models(ran, plain) is (recipe != "fedrod")
        assert [row["bytes_up"] + row["bytes_down"] for row in ran.rows] == [
            row["bytes_up"] + row["bytes_down"] for row in plain.rows
        ]
