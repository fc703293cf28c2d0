"""Checks params.yaml as a whole before anything runs: `noniid check`.

`config` checks the settings. This module also composes each recipe for each scenario. So a pair of
methods that makes no sense is refused now, and not after other recipes have been trained.
"""

from __future__ import annotations

from fedml_noniid import models
from fedml_noniid.core.algorithm import Algorithm
from fedml_noniid.core.component import Setting
from fedml_noniid.core.errors import UserError, together
from fedml_noniid.pipelines.experiment import config
from fedml_noniid.plugins import registry


def check(settings: config.Config) -> None:
    """UserError with every drift after the last round, and every recipe that can't be composed."""
    with together(source=config.FILE) as checked:
        with checked():
            check_drifts(settings)
        for name in settings.recipe_names:
            for scenario in settings.scenario_names:
                with checked("recipes", name):
                    algorithm = compose(settings, name, scenario)
                    if algorithm.leak and "leak" not in name:
                        raise UserError(
                            f"{algorithm.leak}; its name has to say so in every table: call the "
                            f"entry {name + '-leak'!r}"
                        )
        if settings.deploy is not None:
            name = settings.deploy.recipe
            with checked("recipes", name):
                compose(settings, name, settings.deploy.scenario, deployed=True)


def check_drifts(settings: config.Config) -> None:
    """UserError for every drift that would go on after the last round."""
    rounds = settings.train.rounds
    with together() as checked:
        for name in settings.scenario_names:
            drift = settings.scenarios[name].drift
            with checked("scenarios", name, "drift"):
                if drift is not None and drift.last > rounds:
                    raise UserError(
                        f"labels change until round {drift.last}",
                        allowed=f"until {rounds}, the last round",
                    )


def compose(settings: config.Config, name: str, scenario: str, deployed: bool = False) -> Algorithm:
    """The algorithm of an entry of `recipes` in a scenario. UserError if it can't be composed."""
    clients, train = settings.scenarios[scenario], settings.train_of(name)
    setting = Setting(
        clients.clients,
        clients.cohort,
        train.optimizer,
        train.rate.start,
        settings.data.public,
        train.model in models.OF_TEXT,
        deployed,
        momentum=train.momentum,
    )
    algorithm = registry.build(settings.composition(name), settings.recipes[name].settings, setting)
    if bool(clients.waits.buffer) is not algorithm.needs.stale:
        takes = "no answers" if clients.waits.buffer else "nothing but answers"
        raise UserError(
            f"{name} takes {takes} of models of earlier rounds, which scenario {scenario} "
            f"{'has' if clients.waits.buffer else 'has not'}",
            allowed="waits with buffer and concurrency for fedbuff and fedasync, and others for "
            "all other methods",
        )
    for component in algorithm.components:
        component.optimizer(train.build())  # it may refuse the optimiser of `train`
    return algorithm
