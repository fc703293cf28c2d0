"""A method of one's own on silos: it has the simulation's bits, and a silo with other code is
refused by the method's name before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedml_noniid.core.errors import UserError
from tests import own_package
from tests.deploy import world

FEDX = {"fedx": {"mu": 0.3}}
WORDS = "the packages of methods that are not ours must be the same"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    return own_package.write(tmp_path, f"stranger_{tmp_path.name.replace('-', '_')}")


def test_silos_and_pair_equal_the_simulation(file):
    recipe = f"scaffold+{file.parent.name}.fedx.FedX"
    expected = world.digest(world.simulated(recipe, FEDX, True))
    assert expected == world.digest(
        world.simulated("scaffold+fedprox", {"fedprox": FEDX["fedx"]}, True)
    )
    pair = world.pair(recipe, FEDX, True)
    assert type(pair[0]).__name__ == "ScaffoldFedXAggregator"
    assert world.digest(world.run(*pair)) == expected


def test_a_silo_with_other_code_is_refused_before_it_trains(file, monkeypatch):
    recipe = f"{file.parent.name}.fedx.FedX"
    server = world.terms(recipe, FEDX)
    file.write_text(f"{file.read_text()}# another release\n")
    own_package.forget(file.parent.name)
    silo = world.silos_of(world.terms(recipe, FEDX))[1]
    monkeypatch.setattr(silo, "reply", lambda *_: pytest.fail("it trains"))
    with pytest.raises(UserError, match=WORDS):
        silo.answer(world.ServerRun(server, world.shards_of()[0]).down)
