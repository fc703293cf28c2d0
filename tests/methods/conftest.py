"""Every computation by hand is compared with the sequential engine, which is the reference.

`tests/test_parity.py` compares the vectorized engine with it for every recipe; `make test-slow`
compares it with the computations too.
"""

from __future__ import annotations

import pytest


@pytest.fixture(params=["sequential", pytest.param("vectorized", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)
