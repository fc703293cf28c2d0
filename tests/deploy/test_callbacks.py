"""Schedules and callbacks of a deployment: the rate of the round on silos, stops and columns on the
server."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedml_noniid.deploy import settings as silo_settings
from fedml_noniid.deploy.results import RunFile
from fedml_noniid.deploy.server_run import ServerRun
from fedml_noniid.deploy.settings import Deployment
from fedml_noniid.engines.callbacks import Callback, RoundEnd, Row
from fedml_noniid.engines.run import Run
from fedml_noniid.processes import loopback
from tests.deploy import world
from tests.deploy.test_resume import Federation, run
from tests.walks import thinned

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


class Deployed(Federation):
    """With the callbacks of its configuration, as the pair has it."""

    def __init__(self, deployment: Deployment, folder: Path) -> None:
        self.deployment = deployment
        super().__init__(deployment.train_args.recipe, {}, folder)

    def new_server(self) -> ServerRun:
        network = self.deployment.network(tuple(self.data.train.x.shape[1:]), world.CLASSES, None)
        self.terms = silo_settings.terms(
            self.deployment, self.deployment.train_args.recipe, network, self.data.public
        )
        callbacks = self.deployment.train_args.built_callbacks()
        (shard, *_), file = world.shards_of(self.data), RunFile(self.folder / "server", "it")
        return ServerRun(self.terms, shard, callbacks, file=file)


@pytest.mark.parametrize(
    "recipe",
    thinned(["ccvr", "fedavg", "feddyn", "scaffold+fnr", "fednova", "scaffold", "fedbn"]),
)
def test_a_schedule_and_a_stop_give_the_bits_of_the_simulation(recipe: str, tmp_path: Path) -> None:
    """Also with killed processes; CCVR acts on the model of the round that turns out to be the
    last."""
    deployment = world.deployment(recipe, rounds=5, learning_rate=LR, callbacks=OWN)
    for number, rng in enumerate((None, random.Random(7))):
        deployed = Deployed(deployment, tmp_path / str(number))
        run(deployed, rng)
        server = deployed.server
        outcome = server.loop.outcome
        assert [row["done"] for row in server.loop.rows] == [0, 1, 2]
        assert world.digest(outcome) == loopback.simulate(deployment, world.parts(), server.missing)
    constant = world.deployment(recipe, rounds=5, learning_rate=0.2, callbacks=OWN)
    assert loopback.simulate(constant, world.parts()) != loopback.simulate(
        deployment, world.parts()
    )


def test_both_sides_must_have_the_same_schedule_and_may_differ_in_callbacks() -> None:
    def fingerprint(**train: object) -> str:
        deployment = world.deployment("fedavg", **train)
        network = deployment.network((1, 4, 4), world.CLASSES, None)
        return silo_settings.terms(deployment, "fedavg", network).fingerprint

    assert fingerprint(learning_rate=LR) != fingerprint(learning_rate=LR | {"warm_up": 2})
    assert fingerprint(learning_rate=LR) == fingerprint(learning_rate=LR, callbacks=OWN)
