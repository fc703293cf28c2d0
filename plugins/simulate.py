"""Simulates a recipe by its name: the registry's algorithm, composed for the federation."""

from __future__ import annotations

from collections.abc import Sequence

from fedml_noniid.plugins import recipes
from fedml_noniid.plugins.core.algorithm import Algorithm
from fedml_noniid.plugins.engines.callbacks import Callback
from fedml_noniid.plugins.engines.clients import Clients
from fedml_noniid.plugins.engines.federation import Federation
from fedml_noniid.plugins.engines.memory import InMemory
from fedml_noniid.plugins.engines.plan import Plan, Start
from fedml_noniid.plugins.engines.sequential import Sequential
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
    return Simulation(_built(recipe, settings, federation, plan), federation, plan, callbacks)


def reference(
    recipe: str, settings: recipes.Settings, federation: Federation, plan: Plan, streams: bool
) -> Sequential:
    """The sequential engine of such a simulation by itself. It has the memory of no client yet.

    `streams`: as in `Sequential`. Raises UserError.
    """
    algorithm = _built(recipe, settings, federation, plan)
    used = federation.used_by(algorithm)
    start = Start.of(algorithm, plan, used.train.x)
    clients = Clients(start, used, lambda _, first, __: InMemory(first, {}))
    return Sequential(clients, streams=streams)


def _built(
    recipe: str, settings: recipes.Settings, federation: Federation, plan: Plan
) -> Algorithm:
    return recipes.build(recipe, settings, plan.setting(federation.size, federation.n_public))
