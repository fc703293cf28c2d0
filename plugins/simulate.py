"""Simulates a recipe by its name: the registry's algorithm, composed for the federation."""

from __future__ import annotations

from collections.abc import Sequence

from fedml_noniid.plugins import recipes
from fedml_noniid.plugins.engines.callbacks import Callback
from fedml_noniid.plugins.engines.federation import Federation
from fedml_noniid.plugins.engines.plan import Plan
from fedml_noniid.plugins.engines.simulation import Simulation


def simulate(
    recipe: str,
    settings: recipes.Settings,
    federation: Federation,
    plan: Plan,
    callbacks: Sequence[Callback] = (),
) -> Simulation:
    """The simulation, before its first round.

    `settings`: method -> hyper-parameter -> value. Raises UserError.
    """
    setting = plan.setting(federation.size, federation.n_public)
    return Simulation(recipes.build(recipe, settings, setting), federation, plan, callbacks)
