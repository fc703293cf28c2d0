"""Text on silos: the word vectors lie in every shard and never travel; the weights are the
simulation's."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedml_noniid import models
from fedml_noniid.core.data import Samples
from fedml_noniid.data.shards import Parts
from fedml_noniid.deploy import wire
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.models.recurrent import EMBEDDING
from fedml_noniid.simulate import simulate
from tests.deploy import world

SIZES, LENGTH, OPTIONS = (9, 17, 30), 6, {"hidden": 5, "layers": 2}


def parts(seed: int = 0) -> Parts:
    """Texts of 1 to LENGTH of 12 tokens; `seed` is that of the vectors only."""
    rng = np.random.default_rng(3)
    x = rng.integers(1, 12, (100, LENGTH))
    x[np.arange(LENGTH) >= rng.integers(1, LENGTH + 1, 100)[:, None]] = 0
    whole = Samples(torch.tensor(x, dtype=torch.float32), torch.tensor(rng.integers(0, 2, 100)))

    def cut(first: int, last: int) -> Samples:
        return Samples(whole.x[first:last].clone(), whole.y[first:last].clone())

    clients = [np.arange(a, b) for a, b in pairwise(np.cumsum((0, *SIZES)))]
    vectors = torch.tensor(np.random.default_rng(seed).normal(size=(12, 4)), dtype=torch.float32)
    return Parts(cut(0, 56), clients, cut(56, 80), cut(80, 90), cut(90, 100), 2, vectors)


def args(recipe: str) -> SimpleNamespace:
    found = world.args(recipe, {}, False)
    found.model, found.model_options = "lstm", OPTIONS
    return found


def network(of: Parts):
    return models.build("lstm", (LENGTH,), 2, OPTIONS, of.embedding)


def pair(recipe: str, of: Parts):
    """(aggregator, trainers)."""
    return world.hosts(recipe, network, args(recipe), of)


@pytest.mark.parametrize("recipe", ["rfedavg_plus", "scaffold+fnr", "ccvr"])
def test_the_pair_ends_with_the_simulations_weights(recipe):
    """The vectors are in no message, and all the same in the model."""
    data, local = parts(), LocalTraining(lr=world.LR, epochs=world.EPOCHS, batch_size=world.BATCH)
    public = {"validation": data.validation, "public": data.public}
    federation = Federation.from_indices(data.train, data.clients, data.test, **public)
    plan = Plan(network(data), local, world.ROUNDS, 3, world.SEED, engine="sequential")
    simulated = simulate(recipe, {}, federation, plan).run()
    aggregator, trainers = pair(recipe, data)
    message = aggregator.get_model_params()
    ups = [up["leaves"] for _, up in world.uploads(message, trainers)]
    for leaves in [wire.tensors(message), *ups]:
        assert leaves and not any(EMBEDDING in key for key in leaves)
    deployed = world.run(*pair(recipe, data))
    assert world.digest(deployed) == world.digest(simulated)
    assert torch.equal(deployed.params[EMBEDDING], data.embedding)
