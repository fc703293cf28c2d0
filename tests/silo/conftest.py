"""What the tests of the silos share."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator

import pytest


@pytest.fixture
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """FedML's ports are fixed, so tests that need them run one at a time, whatever process pytest runs them in."""
    with (tmp_path_factory.getbasetemp().parent / "ports.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
