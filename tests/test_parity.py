"""The vectorized engine equals the sequential one, for every recipe of the table."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plugins.core.trees import Params, flatten
from plugins.engines.simulation import Outcome
from tests import federation
from tests.recipe_table import RECIPES

TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}


def close(found: Params, wanted: Params, rtol: float) -> None:
    """Relative to the largest number of a tensor: single weights pass through zero."""
    assert found.keys() == wanted.keys()
    for key, leaf in wanted.items():
        assert found[key].dtype == leaf.dtype
        torch.testing.assert_close(found[key], leaf, rtol=rtol, atol=rtol * leaf.abs().max().item(), msg=key)


def close_together(found: Params, wanted: Params, rtol: float) -> None:
    """Relative to the largest number of all: the gradient of a bias before a batch norm is nothing but rounding."""
    assert found.keys() == wanted.keys()
    largest = max((leaf.abs().max().item() for leaf in wanted.values()), default=0.0)
    for key, leaf in wanted.items():
        torch.testing.assert_close(found[key], leaf, rtol=rtol, atol=rtol * largest, msg=key)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("batch_norm", [False, True], ids=["plain", "batch_norm"])
@pytest.mark.parametrize(("recipe", "settings"), RECIPES, ids=[recipe for recipe, _ in RECIPES])
def test_three_rounds_on_ragged_clients(recipe: str, settings: Any, batch_norm: bool, dtype: torch.dtype) -> None:
    """Four of six clients a round; 1 to 12 samples, so 1 to 3 steps, and short last batches."""
    outcomes: list[Outcome] = []
    states: list[Params] = []
    for engine in ("sequential", "vectorized"):
        simulation = federation.simulation(
            recipe, settings, dtype=dtype, batch_norm=batch_norm, engine=engine, epochs=1
        )
        outcomes.append(simulation.run())
        states.append(flatten({"state": simulation.server.state, "memory": simulation.engine.clients.memory}))
    a, b = outcomes
    rtol = TOLERANCE[dtype]
    for part in ("params", "evaluated", "buffers"):
        close(getattr(b, part), getattr(a, part), rtol)
    close_together(states[1], states[0], rtol)
    assert bool(a.buffers) is batch_norm
    for mine, other in zip(a.rows, b.rows, strict=True):
        assert (mine["bytes_up"], mine["bytes_down"]) == (other["bytes_up"], other["bytes_down"])
        for key in ("local_loss", "update_norm_client", "update_norm_server", "test_loss"):
            assert other[key] == pytest.approx(mine[key], rel=rtol)
