"""A method of one's own on silos: it has the simulation's bits, and a silo with other code is
refused by the method's name before anything is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedml_noniid.plugins import foreign
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.silo import wire
from fedml_noniid.plugins.silo.coordinator import Coordinator
from fedml_noniid.plugins.silo.exit_codes import NotAdmittedError
from fedml_noniid.plugins.silo.settings import CommArgs
from fedml_noniid.plugins.silo.silo_client import SiloClient
from fedml_noniid.plugins.silo.silo_server import SiloServer
from tests import own_package
from tests.silo import world
from tests.silo.federation_server import Line, address, hello_of

FEDX = {"fedx": {"mu": 0.3}}
WORDS = r"silo 1 \(rank 2\): its code of 'fedx' is not the server's"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    foreign._known.pop("fedx", None)
    yield own_package.write(tmp_path, f"stranger_{tmp_path.name.replace('-', '_')}")
    foreign._known.pop("fedx", None)


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
    good, other = world.silos_of(server)[0], world.silos_of(server)[1]
    file.write_text(f"{file.read_text()}# another release\n")
    other.terms = world.terms(recipe, FEDX)
    assert other.terms.fingerprint != server.fingerprint
    down = world.ServerRun(server, world.shards_of()[0]).down
    assert good.answer(down) is not None
    monkeypatch.setattr(other, "reply", lambda *_: pytest.fail("it trains"))
    with pytest.raises(UserError, match=WORDS):
        other.answer(down)


def test_the_server_refuses_it_when_it_says_hello(file):
    """Only names of the server are told: a silo may send any."""
    mine = world.terms(f"{file.parent.name}.fedx.FedX", FEDX)
    state = Coordinator(CommArgs(), 3, mine.fingerprint, "r", code=mine.code)
    hello = wire.Hello(session="s", terms=mine.fingerprint, samples=17, code=dict(mine.code))
    assert state.join(1, hello, Line()).run == "r"
    for code in ({"fedx": "0" * 64}, {}, {"evil": "x", "fedx": ""}):
        with pytest.raises(wire.RefusedError, match=WORDS) as error:
            state.join(1, hello.model_copy(update={"terms": "other", "code": code}), Line())
        assert "evil" not in str(error.value)
    with pytest.raises(wire.RefusedError, match="its configuration is not the server's"):
        state.join(1, hello.model_copy(update={"terms": "other"}), Line())


def test_over_the_network_it_is_not_admitted(file, kits):
    """The silo's own process hears why."""
    mine = world.terms(f"{file.parent.name}.fedx.FedX", FEDX)
    file.write_text(f"{file.read_text()}# another release\n")
    theirs = world.terms(f"{file.parent.name}.fedx.FedX", FEDX)
    comm = CommArgs(server=address(), quorum=1, deadline_s=0.2)
    state = Coordinator(comm, 2, mine.fingerprint, "the run", code=mine.code)
    with SiloServer(comm, kits / "0", state):
        with SiloClient(comm, kits / "1", 0, hello_of(mine.fingerprint)) as good:
            assert good.run == "the run"
        changed = hello_of(theirs.fingerprint).model_copy(update={"code": dict(theirs.code)})
        other = SiloClient(comm, kits / "2", 1, changed)
        with pytest.raises(NotAdmittedError, match=WORDS):
            other.__enter__()
        other.__exit__()
    assert state.status()["refused"] == {"configuration": 1}
