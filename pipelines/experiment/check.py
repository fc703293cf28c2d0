"""Checks params.yaml as a whole before anything runs: `noniid check`.

`config` checks the settings. This module also composes each recipe for each scenario. So a pair of
methods that makes no sense is refused now, and not after other recipes have been trained.
"""

from __future__ import annotations

from fedml_noniid.pipelines.experiment import config
from fedml_noniid.plugins import models, recipes
from fedml_noniid.plugins.core.algorithm import Algorithm
from fedml_noniid.plugins.core.component import Setting
from fedml_noniid.plugins.core.errors import UserError


def check(settings: config.Config) -> None:
    """Raises UserError with a line for each drift after the last round, and each recipe that can't
    be composed."""
    errors = dict.fromkeys(f"{config.FILE}: {line}" for line in settings.late())  # a set, in order
    for name in settings.recipe_names:
        for scenario in settings.scenario_names:
            try:
                algorithm = compose(settings, name, scenario)
                leak = algorithm.leak
                if leak and "leak" not in name:
                    raise UserError(
                        f"{leak}; its name has to say so in every table: call the entry "
                        f"{name + '-leak'!r}"
                    )
            except UserError as error:
                errors[f"{config.FILE}: recipes.{name}: {error}"] = None
    if settings.deploy is not None:
        errors |= dict.fromkeys(_undeployable(settings, settings.deploy))
    if errors:
        raise UserError("\n".join(errors))


def _undeployable(settings: config.Config, deploy: config.DeploySettings) -> list[str]:
    """The error of the deployed recipe, if it has one."""
    name, simulated = deploy.recipe, False
    try:
        compose(settings, name, deploy.scenario)
        simulated = True
        compose(settings, name, deploy.scenario, deployed=True)
    except UserError as error:
        what = f"deploy.recipe = {name!r} can't be deployed" if simulated else f"recipes.{name}"
        return [f"{config.FILE}: {what}: {error}"]
    return []


def compose(settings: config.Config, name: str, scenario: str, deployed: bool = False) -> Algorithm:
    """The algorithm of an entry of `recipes` in a scenario. UserError if it can't be composed."""
    clients, train = settings.scenarios[scenario], settings.train_of(name)
    setting = Setting(
        clients.clients,
        clients.cohort,
        train.optimizer,
        train.local.rate.start,
        settings.data.public,
        train.model in models.OF_TEXT,
        deployed,
    )
    algorithm = recipes.build(settings.composition(name), settings.recipes[name].settings, setting)
    for component in algorithm.components:
        component.optimizer(
            train.local.build()
        )  # the component may refuse the optimiser of `train`
    return algorithm
