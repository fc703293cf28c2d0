"""Runs on a virtual clock: the bits, what a method's bytes cost, and what is recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.trees import n_bytes
from fedml_noniid.data.ragged import lists_of
from fedml_noniid.engines.absences import listed
from fedml_noniid.engines.callbacks import Callback, Exchange
from fedml_noniid.engines.plan import Clock
from fedml_noniid.engines.schedule import SECOND, Devices, Waits
from fedml_noniid.engines.simulation import Simulation
from tests import federation
from tests.recipe_table import settings

N = len(federation.SIZES)
COLUMNS = {"clock_s", "wasted_s", "staleness"}
# Client k takes k + 1 microseconds for a step, and messages take no time.
UNEVEN = Devices(tuple(range(1, N + 1)), (0,) * N, (0,) * N)


def simulation(recipe: str, waits: Waits | None = None, **options: Any) -> Simulation:
    clock = None if waits is None else Clock(options.pop("devices", UNEVEN), waits)
    return federation.simulation(recipe, settings(recipe), clock=clock, **options)


@pytest.mark.parametrize(
    ("recipe", "engine"),
    [
        ("scaffold+fnr", "sequential"),
        ("fed3r", "sequential"),  # which takes no local step
        ("fedavg", "vectorized"),
        ("fedrep", "vectorized"),
    ],
)
def test_where_everybody_answers_the_bits_are_those_without_a_clock(
    recipe: str, engine: str
) -> None:
    timed, plain = (simulation(recipe, waits, engine=engine).run() for waits in (Waits(), None))
    assert federation.equal_models(timed, plain)
    for mine, other in zip(timed.rows, plain.rows, strict=True):
        assert mine.keys() - other.keys() == COLUMNS
        rest = other.keys() - {"seconds"}
        assert str([mine[key] for key in rest]) == str([other[key] for key in rest])


def test_late_clients_are_absent() -> None:
    late = simulation("scaffold", Waits(deadline=30))
    schedule = late.loop.plan.schedule
    assert schedule is not None and any(step.late for step in schedule.plan)
    missing = {(t, 0): step.late for t, step in enumerate(schedule.plan, 1)}
    other = simulation("scaffold", absent=listed(missing))
    assert federation.equal_models(late.run(), other.run())
    assert late.outcome.rows[-1]["clock_s"] == schedule.plan[-1].ends / SECOND
    assert sum(row["wasted_s"] for row in late.outcome.rows) > 0


class Steps(Callback):
    """Notes the steps of each client and round, as it reports them."""

    def __init__(self) -> None:
        self.taken: list[dict[str, int]] = []

    def on_exchange(self, exchange: Exchange) -> None:
        reply = exchange.reply
        pairs = zip(map(str, reply.clients), map(int, reply.steps.tolist()), strict=True)
        self.taken.append(dict(pairs))


PARTIAL = Waits(deadline=30, partial=True)


@pytest.mark.parametrize("recipe", ["fedprox", "scaffold"])
def test_partial_work(recipe: str) -> None:
    """Clients take as many steps as they have time for."""
    steps = Steps()
    whole = simulation(recipe, PARTIAL, callbacks=[steps])
    plan = whole.loop.plan
    whole.run()
    assert plan.schedule is not None and not any(step.late for step in plan.schedule.plan)
    full = plan.steps(lists_of(whole.loop.federation.clients).sizes).tolist()
    expected = [
        {str(k): min(full[k], 30 // (k + 1)) for k in plan.draw_cohort(t, N)}
        for t in range(1, plan.rounds + 1)
    ]
    assert steps.taken == expected
    assert any(taken[str(k)] < full[k] for taken in expected for k in map(int, taken))


@pytest.mark.parametrize(("recipe", "models"), [("fedavg", 2), ("scaffold", 4)])
def test_a_methods_own_bytes_take_time(recipe: str, models: int) -> None:
    """A byte takes a microsecond; SCAFFOLD's c and its change are as large as the model."""
    slow = Devices((1,) * N, (SECOND,) * N, (SECOND,) * N)
    made = simulation(recipe, Waits(), devices=slow, local_steps=7, rounds=2)
    size = n_bytes(made.loop.start.params)
    clock = [row["clock_s"] for row in made.run().rows]
    assert clock == [(t * (models * size + 7)) / SECOND for t in (1, 2)]


def test_exchanges_of_components_take_time() -> None:
    """rFedAvg+ asks for mean features: a pass of the clients, before round 1 and after each."""
    alike = Devices((1,) * N, (0,) * N, (0,) * N)
    made = simulation("rfedavg_plus", Waits(), devices=alike, local_steps=7, rounds=1)
    passes = [-(-len(indices) // 4) for indices in made.loop.federation.clients.values()]
    (row,) = made.run().rows
    asked = [passes[k] for k in made.loop.plan.draw_cohort(1, N)]
    assert row["clock_s"] == (max(passes) + 7 + max(asked)) / SECOND


def test_a_checkpoint_of_another_schedule_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    next(simulation("fedavg", Waits(), checkpoint=path).rounds())
    with pytest.raises(UserError, match=r"^the checkpoint has another schedule of clients"):
        simulation("fedavg", Waits(first=3, asked=4), checkpoint=path)


def test_one_client_with_all_data_has_no_clock() -> None:
    assert not COLUMNS & simulation("centralised", Waits()).run().rows[0].keys()


def test_nobody_in_time_is_said() -> None:
    remarks = simulation("fedavg", Waits(deadline=1), rounds=3).remarks
    assert remarks["clock"].startswith("in 3 of 3 rounds nobody would be in time")
    assert "clock" not in simulation("fedavg", Waits()).remarks
