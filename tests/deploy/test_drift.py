"""Concept drift of silos: each holds its own, and all end with the bits of the simulation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedml_noniid.data import shards
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.drift import Drift, drift
from fedml_noniid.deploy import settings as silo_settings
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.engines.hashing import model_tensors
from fedml_noniid.pipelines.stages.deploy import _parts as parts_of_deploy
from fedml_noniid.processes import loopback
from tests.data.test_skew import MIXED, RECURRENT, partitioned, settings
from tests.deploy import world
from tests.deploy.test_skew import shard, study


@pytest.mark.parametrize("skews", [MIXED, RECURRENT], ids=["mixed", "back"])
def test_silos_hold_their_own_drift(digits: Dataset, tmp_path: Path, skews: dict[str, Any]) -> None:
    of = settings(skews)
    place, whole = study(tmp_path, digits, of), partitioned(digits, of).indices.skew.drift
    stage, server = parts_of_deploy(place, of, of.deploy).drift, shard(tmp_path, 0).drift
    for round_ in range(5):
        assert (
            stage.concept(round_).tolist()
            == server.concept(round_).tolist()
            == whole.concept(round_).tolist()
        )
        for client in range(5):
            own = shard(tmp_path, client + 1).drift
            assert own.clients.shape[1] == 1, "nobody else's"
            assert torch.equal(
                own.labels(digits.test_y, 0, round_), whole.labels(digits.test_y, client, round_)
            )


OF_WORLD = drift("incremental", 2, 1, [[0, 1], [2, 3], []], 3, world.CLASSES)


def world_of(kept: Drift | None) -> shards.Parts:
    return replace(world.parts(public=False), drift=kept)


@pytest.mark.parametrize("recipe", ["scaffold", "fedbn"])
@pytest.mark.parametrize("kept", [None, OF_WORLD], ids=["without", "drift"])
def test_silos_end_with_the_bits_of_the_simulation(kept: Drift | None, recipe: str) -> None:
    """FedBN's silos test their own models, with their labels of the round."""
    parts, deployment = world_of(kept), world.deployment(recipe, rounds=3)
    network = deployment.network(tuple(parts.train.x.shape[1:]), parts.n_classes, None)
    terms = silo_settings.terms(deployment, recipe, network)
    server_run = ServerRun(terms, world.shards_of(parts)[0])
    outcome = world.talk(server_run, world.silos_of(terms, parts))
    digest = loopback.weights_sha256(
        model_tensors(outcome.params, outcome.evaluated, outcome.buffers)
    )
    assert digest == loopback.simulate(deployment, parts)
    assert digest != loopback.simulate(deployment, world_of(None if kept else OF_WORLD))
    settings = deployment.train_args.settings
    world.compare(outcome.rows, world.simulated(recipe, settings, True, rounds=3, drift=kept).rows)
