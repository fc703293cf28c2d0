"""Updates that are added up one by one give the bits of those that are held."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fedml_noniid.core.sums import Growing, weighted_mean, weighted_sum
from fedml_noniid.core.trees import row_norms
from fedml_noniid.engines.callbacks import Callback, Columns, RoundEnd
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.engines.workers import Workers
from fedml_noniid.plugins import registry
from tests import federation
from tests.engines.test_order import ADDED, SETTING
from tests.recipe_table import EVERY
from tests.walks import thinned


def streamed(entry: str, **options: Any) -> Simulation:
    recipe, methods = EVERY[entry]
    return federation.simulation(recipe, methods, batch_norm=True, memory_mb=0, **options)


# What a stale answer counts is known when it is there, so FedBuff's are held.
HELD = {name for name, entry in ADDED.items() if registry.build(*entry, SETTING).needs.stale}


@pytest.mark.parametrize("entry", thinned([name for name in ADDED if name not in HELD], 1, 4))
def test_streaming_changes_no_bit(entry: str) -> None:
    recipe, methods = ADDED[entry]
    expected = federation.run(recipe, methods, batch_norm=True, rounds=2)
    simulation = streamed(entry, rounds=2)
    assert simulation.engine.streams and federation.equal(simulation.run(), expected)
    assert len(next(iter(simulation.engine.updates.values()), [0])) == 1  # a client's, not M


@pytest.mark.parametrize("entry", ["scaffold", "fedbn"])
def test_processes_add_up_and_their_sums_are_added_up(entry: str) -> None:
    recipe, methods = ADDED[entry]
    for processes, dtype in ((1, torch.float64), (4, torch.float32)):
        expected = federation.run(recipe, methods, batch_norm=True, dtype=dtype)
        simulation = streamed(entry, workers=2, dtype=dtype)
        assert isinstance(simulation.engine, Workers) and simulation.engine.streams
        simulation.engine = Workers(simulation.engine.clients, processes, cohort=4, streams=True)
        assert federation.equal(simulation.run(), expected)


@pytest.mark.parametrize("entry", thinned(sorted(EVERY.keys() - ADDED.keys() | HELD), every=4))
def test_what_reads_more_than_sums_is_held(entry: str) -> None:
    assert not streamed(entry).engine.streams


class Watches(Callback):
    def measure(self, end: RoundEnd) -> Columns:
        return {"longest": max(leaf.norm() for leaf in end.done.trained.values())}


def test_a_callback_that_may_read_updates_finds_them() -> None:
    recipe, methods = EVERY["fedavg"]
    simulation = federation.simulation(recipe, methods, memory_mb=0, callbacks=[Watches()])
    assert not simulation.engine.streams
    assert simulation.run().rows[0]["longest"] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_rows_grow_as_they_are_added(dtype: torch.dtype) -> None:
    """In two processes, rows of several levels, and one that is not finite."""
    rows = torch.randn(6, 3000, generator=torch.Generator().manual_seed(0), dtype=dtype)
    rows[2] *= 1e6
    rows[4] *= 1e12
    omega = torch.tensor([3.0, 1, 4, 1, 5, 9], dtype=torch.float64)
    for value in (1.0, torch.nan):
        rows[5, 7] = value
        one, other = (Growing((3000,), dtype, omega) for _ in range(2))
        for k in (5, 0, 3):
            one.put(k, rows[k])
        for k in (4, 1, 2):
            other.put(k, rows[k])
        one.absorb(other.state())
        for of in (weighted_mean, weighted_sum):
            found, expected = (of(omega, {"w": leaf})["w"] for leaf in (one, rows))
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(row_norms({"w": one}).nan_to_num(), row_norms({"w": rows}).nan_to_num())
