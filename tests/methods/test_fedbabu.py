"""FedBABU (Oh et al. 2022) against arithmetic by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from fedml_noniid.plugins import recipes
from fedml_noniid.plugins.core.options import RecipeError
from fedml_noniid.plugins.engines.cohort import draw_cohort
from fedml_noniid.plugins.engines.federation import Federation
from fedml_noniid.plugins.engines.packing import flatten
from fedml_noniid.plugins.engines.plan import LocalTraining, Plan
from fedml_noniid.plugins.models.networks import logistic_regression
from fedml_noniid.plugins.simulate import simulate
from tests import federation
from tests.methods import by_hand as hand

HEAD, BODY = ("fc2.weight", "fc2.bias"), ("fc1.weight", "fc1.bias")
WEIGHTS = {
    "size": lambda cohort: [hand.SIZES[k] for k in cohort],
    "uniform": lambda cohort: [1 for _ in cohort],
}


def body(tree: hand.Tree) -> hand.Tree:
    return {key: tree[key] for key in BODY}


def direction(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
    """The head's learning rate is 0."""
    return {
        key: g if key in BODY else np.zeros_like(g) for key, g in hand.gradient(w, x, y).items()
    }


def one_round(
    w: hand.Tree, cohort: Sequence[int], batches: Sequence[list[hand.Array]], weights: str = "size"
) -> hand.Tree:
    n = np.array(WEIGHTS[weights](cohort), dtype=float)
    return hand.average(n / n.sum(), [hand.descend(w, of, direction) for of in batches])


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_two_rounds_train_and_average_the_body(engine: str, weights: str) -> None:
    ran = hand.run("fedbabu", {"fedbabu": {"weights": weights}}, engine=engine)
    w = hand.W0
    for _ in range(2):
        w = one_round(w, (0, 1, 2), [[client] * 2 for client in hand.CLIENTS], weights)
    hand.same(ran.outcome.params, w)
    hand.same(ran.server.params, body(w))


def test_partial_participation_and_small_batches(engine: str) -> None:
    ran = hand.run("fedbabu", engine=engine, rounds=3, cohort=2, batch_size=2)
    w = hand.W0
    for t in (1, 2, 3):
        cohort = draw_cohort(0, t, 3, 2)
        w = one_round(w, cohort, [ran.batches(k, t) for k in cohort])
    hand.same(ran.outcome.params, w)


def test_the_head_keeps_its_initial_values_to_the_bit_and_never_travels(engine: str) -> None:
    """Whatever the optimiser does: a frozen head has no weight decay and no momentum either."""
    ran = hand.run("fedbabu", engine=engine, rounds=3, momentum=0.9, weight_decay=0.1)
    for key in HEAD:
        assert np.array_equal(ran.outcome.params[key].numpy(), hand.W0[key])
    for ask, reply in ran.exchanges:
        assert set(ask.params) == set(reply.deltas) == set(BODY)
    assert not torch.equal(ran.outcome.params["fc1.weight"], torch.tensor(hand.W0["fc1.weight"]))


def test_the_evaluated_model_has_the_random_head() -> None:
    """No fine-tuning: test_loss is that of the whole global model."""
    ran = hand.run("fedbabu")
    whole = {key: leaf.numpy() for key, leaf in ran.outcome.evaluated.items()}
    wanted = hand.loss(whole, hand.PUBLIC_X, hand.PUBLIC_Y)
    assert ran.outcome.rows[-1]["test_loss"] == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_two_bodies_per_client(batch_norm: bool) -> None:
    """2M times the body's share: 6*5 + 5 floats; batch norm adds 5 + 5, and 5 + 5 buffers.

    The head has 5*3 + 3.
    """
    floats = 35 + 20 * batch_norm
    for row in federation.run("fedbabu", batch_norm=batch_norm).rows:
        assert (row["bytes_up"], row["bytes_down"]) == (4 * floats * 4, 4 * floats * 4)


@pytest.mark.parametrize(
    "method", sorted(set(recipes.METHODS) - {"fedbabu", "ccvr", "centralised"})
)
def test_other_methods_see_the_body_only(method: str) -> None:
    """No state, memory or message about the head; it stays as it was drawn."""
    simulation = federation.simulation(f"fedbabu+{method}", dtype=torch.float64)
    before = {key: leaf.clone() for key, leaf in simulation.engine.clients.task.fixed.items()}
    out = simulation.run()
    kept = flatten(
        {"state": simulation.loop.state.slices, "memory": simulation.engine.clients.memory}
    )
    assert not {key.rpartition("/")[2] for key in kept} & set(HEAD)
    assert set(before) == set(HEAD)
    assert all(torch.equal(out.params[key], before[key]) for key in HEAD)


def test_norms_are_those_of_the_body(engine: str) -> None:
    """FedNNNN, beta = 1, no momentum: the server's step is as long as the mean of the clients'
    steps of the body."""
    ran = hand.run(
        "fedbabu+fednnnn", {"fednnnn": {"beta": 1.0, "gamma": 0.0}}, engine=engine, rounds=1
    )
    local = [hand.descend(hand.W0, [client] * 2, direction) for client in hand.CLIENTS]
    e = np.mean([hand.length(hand.each(np.subtract, body(w), body(hand.W0))) for w in local])
    assert ran.outcome.rows[0]["update_norm_server"] == pytest.approx(e, rel=1e-10)


def test_a_model_without_a_body_is_refused() -> None:
    data = hand.samples(hand.X, hand.Y)
    with pytest.raises(
        RecipeError,
        match=r"fedbabu: of model = 'logistic_regression' nothing would be left to",
    ):
        simulate(
            "fedbabu",
            {},
            Federation.of(data, list(hand.CLIENTS), data),
            Plan(
                logistic_regression((2,), 2), LocalTraining(lr=0.1, epochs=1, batch_size=2), 1, 3, 0
            ),
        )
