"""One silo lies in what its method uploads; two others are a quorum: the lie is refused by name,
and the run ends with the weights of a simulation without that silo. Over the real socket."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from fedml_noniid.engines.absences import listed
from fedml_noniid.engines.packing import flatten
from tests.deploy import world
from tests.deploy.federation_server import Federation, Traitor, body

LIAR = 2
LIES = [
    ("fednova", "upload/fednova/a", 0.0, "range"),
    ("fednova", "steps", 0.0, "steps"),
    ("fednova", "loss", math.inf, "non-finite"),
    ("qfedavg", "upload/qfedavg/F", -1.0, "range"),
    ("qfedavg", "upload/qfedavg/F", math.inf, "non-finite"),
    ("fedgen", "upload/fedgen/counts", -1.0, "range"),
    ("fedgen", "upload/fedgen/counts", 2.5, "range"),
    ("scaffold", "upload/scaffold/dc/fc1.weight", 1e20, "range"),
    ("scaffold", "n", 18, "samples"),
]


@pytest.mark.parametrize(("recipe", "key", "value", "name"), LIES)
def test_a_lie_costs_a_silo_its_place_in_the_round_and_nobody_else(
    all_kits: Path, caplog, recipe: str, key: str, value: float, name: str
):
    federation = Federation(all_kits, 3, (0, 1), 2, recipe, quorum=2, deadline_s=3600.0, gone_s=0.0)
    with federation:
        with Traitor(federation, LIAR) as traitor:
            traitor.task()
            good = flatten(federation.server_run.schema)[key]
            lie = torch.full_like(good, value)
            valid = {"upload/fednova/a": torch.ones(())} if recipe == "fednova" else {}
            assert traitor.answer(*body(federation.answer(**valid | {key: lie}))) == name
            assert federation.coordinator.refused == {name: 1}
        assert federation.ended()
    assert federation.error is None
    assert federation.server_run.missing == {(1, 0): {LIAR}, (2, 0): {LIAR}}
    (why,) = (line for line in caplog.messages if line.startswith("refused from silo-3"))
    assert "silo 2 (rank 3)" in why and "round 1" in why
    assert key in why or name == "samples"
    absent = listed({(1, 0): {LIAR}, (2, 0): {LIAR}})
    expected = world.simulated(recipe, {}, False, absent=absent)
    assert world.digest(federation.server_run.loop.outcome) == world.digest(expected)
