"""What the tests of the silos share."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedml_noniid.plugins.silo.authority import make


@pytest.fixture
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """FedML's ports are fixed, so tests that need them run one at a time, whatever process pytest
    runs them in."""
    with (tmp_path_factory.getbasetemp().parent / "ports.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def kits(tmp_path: Path) -> Path:
    """The kits of a server and two silos."""
    make(tmp_path / "kits", 2)
    return tmp_path / "kits"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """The kits of another federation."""
    make(tmp_path / "foreign", 2)
    return tmp_path / "foreign"
