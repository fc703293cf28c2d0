"""Schedules and callbacks of a deployment: the rate of the round on silos, stops and columns on the
server."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedml_noniid.deploy import settings as silo_settings
from fedml_noniid.engines.callbacks import Callback, RoundEnd, Row
from fedml_noniid.engines.run import Run
from fedml_noniid.processes import loopback
from tests.deploy import world
from tests.deploy.test_resume import Federation, run
from tests.recipe_table import settings as table

LR = {"start": 0.2, "decay": "cosine", "warm_up": 1}


@dataclass
class Patient(Callback):
    """Stops after some rounds, counted by itself, and adds the count as a column."""

    rounds: int = 3
    done: int = 0

    def measure(self, end: RoundEnd) -> dict[str, float]:
        return {"done": self.done}

    def stop(self, rows: Sequence[Row]) -> str:
        return "enough" if self.done + 1 == self.rounds else ""

    def on_round(self, run: Run, row: Row) -> None:
        self.done += 1


OWN = {f"{__name__}.Patient": {"rounds": 3}}


@pytest.mark.parametrize("recipe", ["ccvr", "scaffold+fnr", "fedbn"])
def test_a_schedule_and_a_stop_give_the_bits_of_the_simulation(recipe: str, tmp_path: Path) -> None:
    """Also with killed processes; CCVR acts on the model of the round that turns out to be the
    last."""
    methods = table(recipe)
    deployed = Federation(recipe, methods, tmp_path, rounds=5, learning_rate=LR, callbacks=OWN)
    run(deployed, random.Random(7))
    server = deployed.server
    assert [row["done"] for row in server.loop.rows] == [0, 1, 2]
    expected = loopback.simulate(deployed.deployment, world.parts(), server.missing)
    assert world.digest(server.loop.outcome) == expected
    constant = world.deployment(recipe, rounds=5, learning_rate=0.2, callbacks=OWN)
    assert loopback.simulate(constant, world.parts(), server.missing) != expected


def test_both_sides_must_have_the_same_schedule_and_may_differ_in_callbacks() -> None:
    def fingerprint(**train: object) -> str:
        deployment = world.deployment("fedavg", **train)
        network = deployment.network((1, 4, 4), world.CLASSES, None)
        return silo_settings.terms(deployment, "fedavg", network).fingerprint

    assert fingerprint(learning_rate=LR) != fingerprint(learning_rate=LR | {"warm_up": 2})
    assert fingerprint(learning_rate=LR) == fingerprint(learning_rate=LR, callbacks=OWN)
