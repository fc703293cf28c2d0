"""Simulates a recipe by its name: the registry's algorithm, composed for the federation."""

from __future__ import annotations

from collections.abc import Sequence

from fedml_noniid.engines.callbacks import Callback
from fedml_noniid.engines.clock import Clock, ClockOfChosen, scheduled
from fedml_noniid.engines.federation import Federation
from fedml_noniid.engines.plan import Plan
from fedml_noniid.engines.simulation import Simulation
from fedml_noniid.plugins import registry


def simulate(
    recipe: str,
    settings: registry.Settings,
    federation: Federation,
    plan: Plan,
    callbacks: Sequence[Callback] = (),
) -> Simulation:
    """The simulation, before its first round.

    `settings`: method -> hyper-parameter -> value. Raises UserError.
    """
    setting = plan.setting(federation.size, federation.n_public)
    algorithm = registry.build(recipe, settings, setting)
    if plan.clock is not None:
        plan, federation = scheduled(algorithm, federation, plan)
    clock: list[Callback] = [] if plan.schedule is None else [Clock(plan.schedule)]
    clock += [] if plan.work is None else [ClockOfChosen(plan.work)]
    return Simulation(algorithm, federation, plan, [*clock, *callbacks])
