"""Text on silos: the word vectors lie in every shard and never travel; the weights are the
simulation's."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedml_noniid import models
from fedml_noniid.core.data import Samples
from fedml_noniid.core.errors import UserError
from fedml_noniid.data import shards
from fedml_noniid.data.shards import Parts
from fedml_noniid.deploy import settings, wire
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import LocalTraining, Plan
from fedml_noniid.governance import policy
from fedml_noniid.models.recurrent import EMBEDDING
from fedml_noniid.processes import launch
from fedml_noniid.simulate import simulate
from tests.deploy import world
from tests.deploy.federation_server import address

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


def pair(recipe: str, of: Parts, theirs: Parts | None = None):
    """(aggregator, trainers); `theirs`: what the silos have, if something else."""
    return world.hosts(recipe, network, args(recipe), of, theirs)


@pytest.mark.parametrize("recipe", ["rfedavg_plus", "scaffold+fnr", "fedbabu+ccn", "ccvr"])
def test_the_pair_ends_with_the_simulations_weights(recipe):
    """The vectors are in no message, and all the same in the model."""
    data, local = parts(), LocalTraining(lr=world.LR, epochs=world.EPOCHS, batch_size=world.BATCH)
    public = {"validation": data.validation, "public": data.public}
    simulated = simulate(
        recipe,
        {},
        Federation.from_indices(data.train, data.clients, data.test, **public),
        Plan(network(data), local, world.ROUNDS, 3, world.SEED, engine="sequential"),
    ).run()
    aggregator, trainers = pair(recipe, data)
    message = aggregator.get_model_params()
    for leaves in [
        wire.tensors(message),
        *(up["leaves"] for _, up in world.uploads(message, trainers)),
    ]:
        assert leaves and not any(EMBEDDING in key for key in leaves)
    deployed = world.run(*pair(recipe, data))
    assert world.digest(deployed) == world.digest(simulated)
    assert torch.equal(deployed.params[EMBEDDING], data.embedding)


def test_a_silo_with_other_vectors_is_refused():
    aggregator, trainers = pair("fedavg", parts(), parts(seed=1))
    with pytest.raises(UserError, match="its configuration is not the server's"):
        world.uploads(aggregator.get_model_params(), trainers)


def test_a_process_takes_the_network_from_its_shard(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, config = parts(), Path("config.yaml")
    of_model = {"model": "lstm", "model_options": OPTIONS}
    content = {"model_args": of_model, "comm_args": {"server": address()}}
    deployment = settings.check(content | {"train_args": {"max_samples": 100}}, "test")
    config.write_text(deployment.yaml())
    shards.write(deployment.data_args.shard, data)
    policy.admit_own(deployment, next(shards.split(data)), Path())
    for rank in range(4):
        process = launch.Process.from_config(rank, config)
        assert torch.equal(process.network.init(torch.Generator())[0][EMBEDDING], data.embedding)
    assert torch.equal(process.shard.parts["train"].x, data.train.x[data.clients[2]])
    path = Path(deployment.data_args.shard.format(rank=1))
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    save_file(load_file(path) | {"embedding": data.embedding + 1}, path, metadata)
    with pytest.raises(UserError, match="its content doesn't match its checksum"):
        shards.read(path, 1, 3)
    shards.write(deployment.data_args.shard, world.parts())
    with pytest.raises(UserError, match="model 'lstm' takes text only, and the data set is none"):
        launch.Process.from_config(2, config)
