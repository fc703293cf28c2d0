"""Silos with models of their own, such as FedBN's batch norms: each keeps and tests its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedml_noniid.core.trees import row
from fedml_noniid.engines.client_tests import models_of_clients
from fedml_noniid.engines.evaluation import evaluate
from fedml_noniid.engines.packing import flatten
from fedml_noniid.engines.personal import PERSONAL
from tests.deploy import world
from tests.deploy.test_resume import Federation as Silos
from tests.deploy.test_resume import run as talk


@pytest.mark.parametrize(
    ("recipe", "cohort"),
    [
        *(("fedbn", 0), ("fedbn", 2), ("fedproto", 2)),
        *(("ditto+scaffold", 2), ("apfl", 2), ("fedper", 2), ("fedrod", 2), ("finetune", 2)),
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


def test_silos_without_test_samples_leave_the_accuracy_to_the_others(tmp_path: Path) -> None:
    """Silo 2 has none in any case.

    With 0's alone, hits are those of its model; with nobody's, there is no number.
    """
    found = []
    for number, having in enumerate(({0}, set())):
        silos = Silos("fedbn", {}, tmp_path / str(number))
        for k in {0, 1, 2} - having:
            silos.silos[k].engine.clients.tests = {}
        talk(silos)
        found.append(silos.server.loop.rows[-1])
    engine = silos.silos[0].engine
    (test, *_), mine = world.parts().client_tests(), row(engine.clients.memory.whole()[PERSONAL], 0)
    params = silos.server.loop.outcome.params | mine["params"]
    one = evaluate(engine.task.network, params, mine["buffers"], test)
    assert (found[0]["test_accuracy"], found[0]["test_loss"]) == pytest.approx(
        (one.accuracy, one.loss), rel=1e-12
    )
    assert np.isnan(
        [found[1][key] for key in ("test_accuracy", "test_loss", "sent_accuracy")]
    ).all()
