"""A silo that lies to a live server, and a server that lies to a live silo: mutated messages over
gRPC, between processes of `noniid deploy`. `python -m benchmarks attacks` sends 100,000."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import attacks
from tests.walks import thinned

MESSAGES, GROWTH_MB = 200, 20


@pytest.mark.parametrize("siege", thinned([attacks.siege_of_server, attacks.siege_of_silo]))
def test_after_mutated_messages_the_run_ends_with_the_weights_of_the_simulation(
    siege: Callable[[int, int, Path], attacks.Siege], tmp_path: Path
):
    """Each is refused for the reason that the checks alone have. 1.5 GB are among what a server
    sends."""
    found = siege(MESSAGES, 0, tmp_path)
    assert found.good, found
    assert found.sent == MESSAGES
    assert found.after_mb - found.before_mb < GROWTH_MB
    assert found.after_mb < attacks.HUGE / 2**20
    assert {"malformed", "truncated", "oversize", "seal"} <= found.named.keys()
