"""Every computation by hand is compared with both engines."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["sequential", "vectorized"])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)
