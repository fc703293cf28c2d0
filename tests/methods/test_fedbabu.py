"""FedBABU (Oh et al. 2022) against arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedml_noniid.core.options import RecipeError
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.packing import flatten
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.models.networks import logistic_regression
from fedml_noniid.plugins import registry
from fedml_noniid.simulate import simulate
from tests import federation
from tests.methods import by_hand as hand
from tests.recipe_table import settings
from tests.walks import thinned

HEAD, BODY = ("fc2.weight", "fc2.bias"), ("fc1.weight", "fc1.bias")
WEIGHTS = {"size": hand.SIZES, "uniform": (1, 1, 1)}


def body(tree: hand.Tree) -> hand.Tree:
    return {key: tree[key] for key in BODY}


def direction(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
    """The head's learning rate is 0."""
    return {
        key: g if key in BODY else np.zeros_like(g) for key, g in hand.gradient(w, x, y).items()
    }


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    "options", [{}, {"rounds": 3, "cohort": 2, "batch_size": 2}], ids=["full", "twos"]
)
def test_the_body_is_trained_and_averaged(
    engine: str, weights: str, options: dict[str, int]
) -> None:
    """What is evaluated is the whole model with the random head."""
    ran = hand.run("fedbabu", {"fedbabu": {"weights": weights}}, engine=engine, **options)
    w = ran.federated(lambda w, k, of: hand.descend(w, of, direction), WEIGHTS[weights])
    hand.same(ran.outcome.params, w)
    hand.same(ran.server.params, body(w))
    wanted = hand.loss(w, hand.PUBLIC_X, hand.PUBLIC_Y)
    assert ran.outcome.rows[-1]["test_loss"] == pytest.approx(wanted, rel=1e-10)


def test_the_head_keeps_its_initial_values_to_the_bit_and_never_travels(engine: str) -> None:
    """Whatever the optimiser does: a frozen head has no weight decay and no momentum either."""
    ran = hand.run("fedbabu", engine=engine, rounds=3, momentum=0.9, weight_decay=0.1)
    for key in HEAD:
        assert np.array_equal(ran.outcome.params[key].numpy(), hand.W0[key])
    for ask, reply in ran.exchanges:
        assert set(ask.params) == set(reply.deltas) == set(BODY)
    assert not torch.equal(ran.outcome.params["fc1.weight"], torch.tensor(hand.W0["fc1.weight"]))


REFUSED = {
    "fedbabu",
    "ccvr",
    "centralised",
    "fed3r",
    "fedper",
    "fedproto",
    "fedrep",
    "fedrod",
    "linear_probe",
}


@pytest.mark.parametrize("method", thinned(sorted(registry.METHODS.keys() - REFUSED), 0, 5))
def test_other_methods_see_the_body_only(method: str) -> None:
    """No state, memory or message about the head; it stays as it was drawn."""
    recipe = f"fedbabu+{method}"
    simulation = federation.simulation(recipe, settings(recipe), dtype=torch.float64)
    before = {key: leaf.clone() for key, leaf in simulation.engine.clients.task.fixed.items()}
    out = simulation.run()
    stored = flatten(
        {"state": simulation.loop.state.slices, "memory": simulation.engine.clients.memory.whole()}
    )
    assert not {key.rpartition("/")[2] for key in stored} & set(HEAD)
    assert set(before) == set(HEAD)
    assert all(torch.equal(out.params[key], before[key]) for key in HEAD)


def test_a_model_without_a_body_is_refused() -> None:
    data = hand.samples(hand.X, hand.Y)
    with pytest.raises(
        RecipeError,
        match=r"fedbabu: of model = 'logistic_regression' nothing would be left to",
    ):
        simulate(
            "fedbabu",
            {},
            Federation.from_indices(data, list(hand.CLIENTS), data),
            Plan(
                logistic_regression((2,), 2), LocalTraining(lr=0.1, epochs=1, batch_size=2), 1, 3, 0
            ),
        )
