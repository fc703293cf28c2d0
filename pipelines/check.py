"""Checks params.yaml as a whole before anything runs: `python -m pipelines.check`.

Beyond what `config` checks, each recipe is composed for each scenario, so that a pair of methods that makes no sense
is refused now and not after the recipes before it have been trained.
"""

from __future__ import annotations

import argparse
import sys

from pipelines import cli, config
from plugins import models, recipes
from plugins.core.algorithm import Algorithm
from plugins.core.component import Setting
from plugins.core.errors import UserError


def check(_: argparse.Namespace) -> None:
    """Raises UserError with a line for each recipe that can't be composed."""
    settings = config.load()
    errors: dict[str, None] = {}  # a set in the order of the recipes
    for name in settings.recipe_names:
        for scenario in settings.scenario_names:
            try:
                algorithm = _compose(settings, name, scenario)
                algorithm.optimizer(settings.train.local.build())  # a method may refuse the one of train
                leak = algorithm.leak
                if leak and "leak" not in name:
                    raise UserError(f"{leak}; its name has to say so in every table: call the entry {name + '-leak'!r}")
            except UserError as error:
                errors[f"{config.FILE}: recipes.{name}: {error}"] = None
    deployed = settings.deploy.recipe
    try:
        reason = _compose(settings, deployed, settings.deploy.scenario).simulation_only
        if reason:
            errors[f"{config.FILE}: deploy.recipe = {deployed!r} can't be deployed: {reason}"] = None
    except UserError as error:
        errors[f"{config.FILE}: recipes.{deployed}: {error}"] = None
    if errors:
        raise UserError("\n".join(errors))


def _compose(settings: config.Config, name: str, scenario: str) -> Algorithm:
    clients, cohort = settings.scenarios[scenario].clients, settings.scenarios[scenario].cohort
    # The data are not read yet; that a model has fewer classes or features than two is none of a method's concern.
    train = settings.train
    setting = Setting(
        clients, cohort, 2, 2, train.optimizer, train.lr, settings.data.public, train.model in models.OF_TEXT
    )
    return recipes.build(settings.composition(name), settings.recipes[name].settings, setting)


if __name__ == "__main__":
    sys.exit(cli.run(check, __doc__, sys.argv[1:]))
