"""What the tests of the silos share: FedML's ports, certificates, a server that asks nothing."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedml_noniid import own_code
from fedml_noniid.credentials.authority import make
from fedml_noniid.deploy import silo_client
from fedml_noniid.deploy.coordinator import Coordinator
from fedml_noniid.deploy.settings import CommArgs
from fedml_noniid.deploy.silo_server import SiloServer
from tests.deploy.federation_server import Idle, address


@pytest.fixture(autouse=True)
def _any_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a silo's policy lets this process import is forgotten after the test."""
    monkeypatch.setattr(own_code, "_only", None)


@pytest.fixture(autouse=True)
def asking_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silo in this process that was refused asks again at once, not after 0.2 to 5 seconds."""
    monkeypatch.setattr(silo_client, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(silo_client, "LONGEST_PAUSE_S", 0.1)


@pytest.fixture
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """FedML's ports are fixed, so tests that need them run one at a time, whatever process pytest
    runs them in."""
    with (tmp_path_factory.getbasetemp().parent / "ports.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def authority(factory: pytest.TempPathFactory, name: str, silos: int) -> Path:
    """Makes the kits of a server and its silos."""
    folder = factory.mktemp(name) / "kits"
    make(folder, silos)
    return folder


@pytest.fixture(scope="session")
def all_kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kits of a server and nine silos. No test may change them."""
    return authority(tmp_path_factory, "authority", 9)


@pytest.fixture
def kits(tmp_path: Path, all_kits: Path) -> Path:
    """A copy for one test, of a server and two silos."""
    ignored = shutil.ignore_patterns("[3-9]*")
    return Path(shutil.copytree(all_kits, tmp_path / "kits", ignore=ignored))


@pytest.fixture(scope="session")
def others_kits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kits of another federation. No test may change them."""
    return authority(tmp_path_factory, "foreign", 2)


@pytest.fixture
def foreign(tmp_path: Path, others_kits: Path) -> Path:
    """A copy of them beside `kits`."""
    return Path(shutil.copytree(others_kits, tmp_path / "foreign"))


@pytest.fixture
def idle(kits: Path) -> Iterator[Idle]:
    """A server of two silos that asks nothing, with kits of its own."""
    comm = CommArgs(server=address(), quorum=1, deadline_s=0.2)
    coordinator = Coordinator(comm, 2, "study", "run")
    with SiloServer(comm, kits / "0", coordinator) as server:
        yield Idle(coordinator, server, comm, kits)
