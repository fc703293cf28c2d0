"""Stock FedML over real gRPC: a server and three silos as processes on loopback, one recipe after the other.

FedML's ports are fixed: a loopback run waits for another one on the same machine.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from pathlib import Path

import pytest

from plugins.core.errors import UserError
from plugins.silo import loopback, settings, transport
from tests.recipe_table import PARAMETERS
from tests.silo import world

DEADLINE_S = 120.0
pytestmark = pytest.mark.usefixtures("ports")


def deployment(recipe: str, rounds: int = world.ROUNDS, **train: object) -> settings.Deployment:
    methods = {method: PARAMETERS[method] for method in recipe.split("+") if method in PARAMETERS}
    content = {
        "common_args": {"random_seed": world.SEED},
        "model_args": {"model": "mlp", "model_options": {"hidden": world.HIDDEN, "batch_norm": True}},
        "train_args": {
            "recipe": recipe, "settings": methods, "rounds": rounds, "epochs": world.EPOCHS, "batch_size": world.BATCH,
            "learning_rate": world.LR, **train,
        },
    }  # fmt: skip
    return settings.check(content, "test")


@pytest.mark.parametrize(
    ("recipe", "cohort"),
    [("fnr", 0), ("fednnnn", 0), ("ccn", 0), ("fednlr", 2), ("rfedavg", 0), ("rfedavg_plus", 0),
     ("fedbabu+ccn", 0),  # only the body travels
     ("ccvr+feddf", 0),  # the server learns on public data, and asks once more after the last round
     *(pytest.param(recipe, 2, marks=pytest.mark.slow) for recipe in (
         "scaffold+fnr+rfedavg_plus+ccn", "datasharing+feddyn+fednlr", "moon+fnr", "fedgen+fednova", "fedftg+sgdm",
     ))],
)  # fmt: skip
def test_three_silos_end_with_the_weights_of_the_simulation(recipe, cohort, tmp_path):
    terms = deployment(recipe, cohort=cohort)
    parts = world.parts(public=loopback.needs_public(recipe))
    assert loopback.run(terms, parts, tmp_path, DEADLINE_S) == loopback.simulate(terms, parts)
    rows = (tmp_path / "run" / "rounds.csv").read_text().splitlines()
    assert len(rows) == 1 + world.ROUNDS
    assert rows[0].startswith("round,test_accuracy,test_loss,validation_accuracy")


def test_a_killed_silo_ends_the_run_and_is_named(tmp_path):
    """Killed once the run is under way; the loopback run ends long before its deadline, and leaves nobody behind."""
    log = tmp_path / "run" / "fedml-2.log"
    started: list[int] = []
    real = loopback.multiprocessing.get_context

    def kill() -> None:
        while not (log.is_file() and "receive_message" in log.read_text()):
            time.sleep(0.05)
        started[0].kill()

    class Context:
        def __init__(self, kind: str) -> None:
            self.inner = real(kind)

        def set_forkserver_preload(self, names: list[str]) -> None:
            self.inner.set_forkserver_preload(names)

        def Process(self, **options: object):  # noqa: N802, multiprocessing's name
            process = self.inner.Process(**options)
            if options["args"][0] == 2:
                started.append(process)
            return process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loopback.multiprocessing, "get_context", Context)
        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        began = time.monotonic()
        with pytest.raises(UserError, match=rf"^silo 1 \(rank 2\): was killed by signal {signal.SIGKILL.value}; see "):
            loopback.run(deployment("fedavg", rounds=100_000), world.parts(public=False), tmp_path, DEADLINE_S)
    assert time.monotonic() - began < DEADLINE_S / 2
    for rank in range(4):
        transport.check_port(rank)


def test_a_diverging_silo_stops_everybody_with_one_clear_error(tmp_path):
    """The silo tells the server, the server tells the others; nobody waits for a deadline."""
    began = time.monotonic()
    with pytest.raises(UserError) as found:
        loopback.run(deployment("fedavg", learning_rate=1e30), world.parts(public=False), tmp_path, DEADLINE_S)
    assert re.match(
        r"server \(rank 0\): round 1, silo \d \(rank \d\): round 1, client \d: loss or update is not finite",
        str(found.value),
    )
    assert time.monotonic() - began < DEADLINE_S / 2
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_a_deadline_ends_a_run(tmp_path):
    with pytest.raises(UserError, match=r"not over after 6 s: server \(rank 0\), silo 0 \(rank 1\)"):
        loopback.run(deployment("fedavg", rounds=100_000), world.parts(public=False), Path(tmp_path), 6.0)
    for rank in range(4):
        transport.check_port(rank)
