"""The federated linear probe: only the classifier moves."""

from __future__ import annotations

import numpy as np
import torch

from fedml_noniid.models import build
from tests import federation
from tests.methods import by_hand as hand

HEAD = ("fc2.weight", "fc2.bias")


def direction(w: hand.Tree, x: hand.Array, y: hand.Array) -> hand.Tree:
    """The learning rate of all layers before the classifier is 0."""
    return {
        key: g if key in HEAD else np.zeros_like(g) for key, g in hand.gradient(w, x, y).items()
    }


def test_only_the_classifier_is_trained_sent_and_averaged(engine: str) -> None:
    """Whatever the optimiser does: the other layers have no weight decay either."""
    how = {"rounds": 3, "cohort": 2, "batch_size": 2}
    ran = hand.run("linear_probe", engine=engine, **how)
    hand.same(ran.outcome.params, ran.federated(lambda w, k, of: hand.descend(w, of, direction)))
    for ask, reply in ran.exchanges:
        assert set(ask.params) == set(reply.deltas) == set(HEAD)
    decayed = hand.run("linear_probe", engine=engine, momentum=0.9, weight_decay=0.1, **how)
    for key in hand.W0.keys() - {*HEAD}:
        assert np.array_equal(decayed.outcome.params[key].numpy(), hand.W0[key])


def test_on_features_it_is_fedavg_to_the_bit(engine: str) -> None:
    """A linear network has no layer before its classifier."""
    net = build("logistic_regression", (6,), federation.N_CLASSES)
    for dtype in (torch.float32, torch.float64):
        probe, plain = (
            federation.run(recipe, model=net, dtype=dtype, engine=engine)
            for recipe in ("linear_probe", "fedavg")
        )
        assert federation.equal(probe, plain)
