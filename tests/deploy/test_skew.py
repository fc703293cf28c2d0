"""Skews of silos: they hold what the simulation trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fedml_noniid.core.data import Samples
from fedml_noniid.data import shards
from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.indices import INDICES
from fedml_noniid.pipelines.experiment.config import Config
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages.deploy import _parts as parts_of_deploy
from tests.data.test_skew import SKEWS, item, partitioned, settings


def study(folder: Path, digits: Dataset, of: Config) -> Workspace:
    """An experiment whose data and partition are there, and the files of its processes."""
    place = Workspace.from_environment(folder, {})
    digits.save(place.dataset("digits"))
    indices = place.partition("s", 3) / INDICES
    indices.parent.mkdir(parents=True)
    indices.write_bytes(partitioned(digits, of).indices.content)
    assert shards.cut(place.dataset("digits"), indices, folder / "shards") == 5
    return place


def shard(folder: Path, rank: int) -> shards.Shard:
    return shards.read(folder / "shards" / f"{rank}.safetensors", rank, 5)


def same(one: Samples, other: Samples) -> bool:
    return torch.equal(one.x, other.x) and torch.equal(one.y, other.y)


@SKEWS
def test_silos_hold_what_the_simulation_trains_on(
    digits: Dataset, tmp_path: Path, skews: dict[str, Any]
) -> None:
    """The files of `noniid deploy shards`, and the parts of the deploy stage, to the bit."""
    of, simulated = settings(skews), item(digits, skews)
    clients, tests = simulated.simulation().engine.clients, simulated.client_tests()
    parts = parts_of_deploy(study(tmp_path, digits, of), of, of.deploy)
    for client, positions in clients.indices.items():
        mine = shard(tmp_path, client + 1).parts
        expected = Samples(clients.train.x[positions], clients.train.y[positions])
        of_stage = parts.clients[client]
        assert same(mine["test"], tests[client]) and same(mine["train"], expected)
        assert same(Samples(parts.train.x[of_stage], parts.train.y[of_stage]), expected)
    assert same(shard(tmp_path, 0).parts["test"], Samples(digits.normalised("test"), digits.test_y))
