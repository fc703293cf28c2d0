"""A method of one's own on silos: it has the simulation's bits, and a silo with other code is
refused by the method's name before anything is trained."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from fedml_noniid.cli.app import main
from fedml_noniid.core.errors import UserError
from fedml_noniid.deploy.coordinator import Coordinator
from fedml_noniid.deploy.exit_codes import LostError
from fedml_noniid.deploy.settings import CommArgs
from fedml_noniid.deploy.silo_client import SiloClient
from fedml_noniid.deploy.silo_server import SiloServer
from fedml_noniid.governance import study
from tests import own_package
from tests.deploy import world
from tests.deploy.federation_server import address, hello_of

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


def test_its_messages_are_shown(file, capsys):
    recipe = f"scaffold+{file.parent.name}.fedx.FedX"
    assert main(["methods", "show", recipe]) == 0
    out = capsys.readouterr().out
    assert out.startswith("fedx+scaffold: composes") and "upload/scaffold/dc/*" in out


def test_a_silo_with_other_code_is_refused_before_it_trains(file, monkeypatch):
    recipe = f"{file.parent.name}.fedx.FedX"
    server = world.terms(recipe, FEDX)
    good, other = world.silos_of(server)[0], world.silos_of(server)[1]
    file.write_text(f"{file.read_text()}# another release\n")
    own_package.forget(file.parent.name)
    other.terms = world.terms(recipe, FEDX)
    assert other.terms.fingerprint != server.fingerprint
    down = world.ServerRun(server, world.shards_of()[0]).down
    assert good.answer(down) is not None
    monkeypatch.setattr(other, "reply", lambda *_: pytest.fail("it trains"))
    with pytest.raises(UserError, match=WORDS):
        other.answer(down)


def test_a_study_names_the_code_that_is_not_the_signed_one(file):
    recipe = f"{file.parent.name}.fedx.FedX"
    made = world.deployment(recipe, settings=FEDX)
    signed = study.make(made, world.shards_of()[0], "of fedx", datetime.date(2030, 1, 1))
    signed.check_terms(world.terms(recipe, FEDX, batch_norm=True))
    file.write_text(f"{file.read_text()}# another release\n")
    own_package.forget(file.parent.name)
    with pytest.raises(UserError, match="the code of 'fedx' is not what was signed"):
        signed.check_terms(world.terms(recipe, FEDX, batch_norm=True))


def test_a_silo_with_another_study_is_not_admitted(kits):
    """The silo's own process hears why."""
    comm = CommArgs(server=address(), quorum=1, deadline_s=0.2, lost_s=0.5)
    state = Coordinator(comm, 2, "this study", "the run")
    with SiloServer(comm, kits / "0", state):
        with SiloClient(comm, kits / "1", 0, hello_of("this study")) as good:
            assert good.run == "the run"
        other = SiloClient(comm, kits / "2", 1, hello_of("another"))
        with pytest.raises(LostError, match=r"silo 1 \(rank 2\): its study is not the ser"):
            other.__enter__()
        other.__exit__()
    assert state.status()["refused"].keys() == {"configuration"}
