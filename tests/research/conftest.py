"""The authors' code of two papers is known to each test, as it is to the commands."""

from __future__ import annotations

import pytest

from research import replicas


@pytest.fixture(autouse=True)
def known_replicas(nobody_elses_methods: None) -> None:
    """Registers them after the other packages' methods of the last test are forgotten."""
    replicas.register()
