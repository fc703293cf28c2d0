"""Every method learns scikit-learn's digits from clients that each know about five of the ten
classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fedml_noniid.core.data import Samples
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.models import build
from fedml_noniid.plugins.registry import METHODS
from fedml_noniid.simulate import simulate
from tests.walks import thinned

N_CLIENTS, ROUNDS = 10, 5
# What is slow gets more rounds: a random classifier, random layers before it, a step size that is
# a bound's, SCAFFOLD's option I, a momentum of which a tenth is new, an own model that follows the
# received one, models that share the clients, signs with one length.
SLOW = (
    "centred_clipping",
    "ef_sign",
    "fedbabu",
    "dpfedavg",
    "dpsgd",
    "qfedavg",
    "scaffold_i",
    "fedcm",
    "ditto",
    "fedrep",
    "finetune",
    "ifca",
)
# Rules that leave clients out want clients that are alike: these have all classes.
ALIKE = ("centred_clipping", "krum", "median", "rfa", "trimmed_mean")
MORE_ROUNDS = dict.fromkeys(SLOW, 12) | {"linear_probe": 30}
# Defaults that are made for other step sizes and losses than these.
SETTINGS: dict[str, dict[str, object]] = {
    "dpfedavg": {"clip": 3.0, "noise": 0.05},
    "dpsgd": {"clip": 2.0, "noise": 0.3},
    "fed3r": {"fine_tune": True},
    "fedgen": {"generative_alpha": 1.0, "generative_beta": 1.0},
    "qfedavg": {"q": 0.1},
    "feddf": {"steps": 50},
}


@pytest.fixture(scope="module")
def digits() -> tuple[Samples, list[Any], Samples, Samples]:
    """(train, clients, test, public): 1297, 400 and 100 images."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x, y = torch.tensor(images[order] / 16, dtype=torch.float32), torch.tensor(labels[order])
    test, public, train = (
        Samples(x[part], y[part]) for part in (slice(400), slice(400, 500), slice(500, None))
    )
    # Sorted by label and cut into 40 shards, four for each client.
    shards = np.array_split(np.argsort(train.y.numpy(), kind="stable"), 4 * N_CLIENTS)
    clients = [np.sort(np.concatenate(shards[k::N_CLIENTS])) for k in range(N_CLIENTS)]
    return train, clients, test, public


LEARNING = ["scaffold+fnr+rfedavg_plus+ccn", "fedavg", *sorted(METHODS)]


@pytest.mark.parametrize("recipe", thinned(LEARNING, 0, 6))
def test_it_learns_digits(recipe: str, digits: tuple[Samples, list[Any], Samples, Samples]) -> None:
    if recipe in METHODS and METHODS[recipe]().mechanism is not None:
        pytest.importorskip("dp_accounting", reason="epsilon needs the extra [privacy]")
    train, clients, test, public = digits
    if recipe in ALIKE:
        clients = [np.sort(part) for part in np.array_split(np.arange(len(train.y)), N_CLIENTS)]
    settings = {recipe: SETTINGS[recipe]} if recipe in SETTINGS else {}
    local, network = (
        LocalTraining(lr=0.2, epochs=2, batch_size=16),
        build("mlp", (64,), 10, {"hidden": 32}),
    )
    plan = Plan(network, local, MORE_ROUNDS.get(recipe, ROUNDS), N_CLIENTS, 0, engine="vectorized")

    def tests() -> list[Samples]:
        """Of the models that clients have for themselves: of their own classes."""
        held = [torch.isin(test.y, train.y[positions]) for positions in clients]
        return [Samples(test.x[mine], test.y[mine]) for mine in held]

    federation = Federation.from_indices(train, clients, test, public=public, tests=tests)
    rows = simulate(recipe, settings, federation, plan).run().rows
    assert rows[-1]["test_accuracy"] > 0.75
    assert rows[-1]["test_loss"] < rows[0]["test_loss"]
    if recipe != "fedgen":  # whose local loss has further terms from round 2 on
        assert rows[-1]["local_loss"] < rows[0]["local_loss"]
