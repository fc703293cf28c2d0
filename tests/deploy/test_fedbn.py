"""Silos with models of their own, such as FedBN's batch norms: each keeps and tests its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedml_noniid.core.trees import row
from fedml_noniid.engines.client_tests import models_of_clients
from fedml_noniid.engines.packing import flatten
from tests.deploy import world
from tests.deploy.test_resume import Federation as Silos
from tests.deploy.test_resume import run as talk


@pytest.mark.parametrize(
    ("recipe", "cohort"),
    [
        *(("fedbn", 0), ("fedproto", 2), ("ditto+scaffold", 2), ("apfl", 2), ("fedper", 2)),
        *(pytest.param(recipe, 2, marks=pytest.mark.slow) for recipe in ("fedrod", "finetune")),
    ],
)
def test_silos_have_the_own_models_of_the_simulation(
    tmp_path: Path, recipe: str, cohort: int
) -> None:
    """Message by message: the same bits on every silo, and none of them on the server.

    Each silo tests its own model, also one that rests: the same accuracies.
    """
    options = {"apfl": {"adaptive": True}, "fedper": {"keep": ["fc1.*"]}}
    settings = {recipe: options[recipe]} if recipe in options else {}
    silos = Silos(recipe, settings, tmp_path, cohort)
    talk(silos)
    expected = world.simulated(recipe, settings, True, cohort, rounds=3)
    world.compare(silos.server.loop.rows, expected.rows)
    sent = silos.server.loop.state
    for k, silo in enumerate(silos.silos):
        found = flatten(row(models_of_clients(silo.engine.clients, sent.params, sent.buffers), 0))
        wanted = flatten(row(expected.personal, k))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], leaf) for key, leaf in wanted.items())
    outcome = silos.server.loop.outcome
    assert not outcome.personal
    assert all(torch.equal(outcome.params[key], expected.params[key]) for key in expected.params)
