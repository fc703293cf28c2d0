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
from tests.deploy.federation_server import body
from tests.deploy.test_refusals import betrayed

LIAR = 2
LIES = [
    ("fednova", "upload/fednova/a", 0.0, "range"),
    ("qfedavg", "upload/qfedavg/F", math.inf, "non-finite"),
    ("fedgen", "upload/fedgen/counts", 2.5, "range"),
    ("scaffold", "n", 18, "samples"),
]


@pytest.mark.parametrize(("recipe", "key", "value", "name"), LIES)
def test_a_lie_costs_a_silo_its_place_in_the_round_and_nobody_else(
    all_kits: Path, caplog, recipe: str, key: str, value: float, name: str
):
    with betrayed(all_kits, quorum=2, recipe=recipe) as (federation, traitor):
        lie = torch.full_like(flatten(federation.server_run.schema)[key], value)
        assert traitor.answer(*body(federation.answer(**{key: lie}))) == name
        assert federation.coordinator.refused == {name: 1}
    assert federation.error is None
    assert federation.server_run.missing == {(1, 0): {LIAR}, (2, 0): {LIAR}}
    (why,) = (line for line in caplog.messages if line.startswith("refused from silo-3"))
    assert "silo 2 (rank 3)" in why and "round 1" in why
    assert key in why or name == "samples"
    absent = listed({(1, 0): {LIAR}, (2, 0): {LIAR}})
    expected = world.simulated(recipe, {}, False, absent=absent)
    assert world.digest(federation.server_run.loop.outcome) == world.digest(expected)
