"""Skews of silos: they hold what the simulation trains on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.stages.deploy import _parts as parts_of_deploy
from fedml_noniid.plugins.data import datasets
from fedml_noniid.plugins.data.dataset import Dataset
from fedml_noniid.plugins.silo import shards
from tests.data.test_skew import LABEL_NOISE, ROTATION, SKEWS, item, partitioned, settings


@pytest.fixture(scope="module")
def digits() -> Dataset:
    return datasets.load("digits", Path())


@SKEWS
def test_silos_hold_what_the_simulation_trains_on(
    digits: Dataset, tmp_path: Path, skews: dict[str, Any]
) -> None:
    """The files of `noniid deploy shards`, and the parts of the deploy stage, to the bit."""
    of, place = settings(skews), Workspace.of(tmp_path, {})
    clients = item(digits, skews).simulation().engine.clients
    digits.save(place.dataset("digits"))
    indices = place.partition("s", 3) / "indices.json"
    indices.parent.mkdir(parents=True)
    indices.write_text(partitioned(digits, of).indices.text)
    assert shards.cut(place.dataset("digits"), indices, tmp_path / "shards") == 5
    parts, tests = parts_of_deploy(place, of), item(digits, skews).client_tests()
    for client, positions in clients.indices.items():
        mine = shards.read(tmp_path / "shards" / f"{client + 1}.safetensors", client + 1, 5).parts
        assert torch.equal(mine["test"].x, tests[client].x) and torch.equal(
            mine["test"].y, tests[client].y
        )
        train = mine["train"]
        for held in (
            train,
            type(train)(parts.train.x[parts.clients[client]], parts.train.y[parts.clients[client]]),
        ):
            assert torch.equal(held.x, clients.train.x[positions]) and torch.equal(
                held.y, clients.train.y[positions]
            )
    server = shards.read(tmp_path / "shards" / "0.safetensors", 0, 5).parts["test"]
    assert torch.equal(server.x, digits.normalised("test")) and torch.equal(server.y, digits.test_y)


def test_another_number_of_silos_is_dealt_and_skewed_anew(digits: Dataset, tmp_path: Path) -> None:
    of, place = settings(LABEL_NOISE | ROTATION), Workspace.of(tmp_path, {})
    of = of.model_copy(update={"deploy": of.deploy.model_copy(update={"silos": 3})})
    digits.save(place.dataset("digits"))
    indices = place.partition("s", 3) / "indices.json"
    indices.parent.mkdir(parents=True)
    indices.write_text(partitioned(digits, of).indices.text)
    parts, clean = parts_of_deploy(place, of), digits.normalised("train")
    assert len(parts.clients) == 3
    for client, positions in enumerate(parts.clients):
        assert torch.equal(parts.train.x[positions], torch.rot90(clean[positions], client, (2, 3)))
    wrong = [
        (parts.train.y[own] != digits.train_y[own]).float().mean().item() for own in parts.clients
    ]
    assert wrong[0] == 0 < wrong[1] < wrong[2]
