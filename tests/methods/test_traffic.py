"""What a round costs in bytes, worked out for the models of `tests.federation`."""

from __future__ import annotations

from typing import Any

import pytest

from tests import federation

# 6 inputs, 5 hidden neurons, 3 classes: 35 + 18 = 53 numbers; batch norm: 10 more, and 10 buffers.
MODEL, BODY, NORM, BUFFERS = 53, 35, 10, 10
COHORT, BYTES = 4, 4
CASES: list[tuple[str, dict[str, Any], bool, int, int]] = [  # numbers up and down, of one client
    *((recipe, {}, False, MODEL, MODEL) for recipe in ("fedavg", "fedrs", "fedlc", "sgdm_local")),
    *(
        (recipe, {}, True, MODEL + NORM + BUFFERS, MODEL + NORM + BUFFERS)
        for recipe in ("moon", "sgdm_server")
    ),
    ("fedbabu", {}, False, BODY, BODY),
    ("fedbabu", {}, True, BODY + NORM + BUFFERS, BODY + NORM + BUFFERS),
    ("sgdm", {}, False, 2 * MODEL, 2 * MODEL),  # v has no buffers
    ("sgdm", {}, True, 2 * (MODEL + NORM) + BUFFERS, 2 * (MODEL + NORM) + BUFFERS),
    ("qfedavg", {}, False, MODEL + 1, MODEL),  # the loss
    ("feddc", {}, False, 2 * MODEL, 2 * MODEL),  # the change of Delta_k; Delta
]


@pytest.mark.parametrize(("recipe", "settings", "batch_norm", "up", "down"), CASES)
def test_bytes_of_a_round(
    recipe: str, settings: dict[str, Any], batch_norm: bool, up: int, down: int
) -> None:
    for row in federation.run(recipe, settings, batch_norm=batch_norm).rows:
        found = row["bytes_up"], row["bytes_down"]
        assert found == (COHORT * up * BYTES, COHORT * down * BYTES)
