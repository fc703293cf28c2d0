"""Chooses a method for one's own data in this process: the race of `noniid choose`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fedml_noniid.api import running, settings
from fedml_noniid.api.data import Data
from fedml_noniid.api.process import in_turn
from fedml_noniid.api.result import Files
from fedml_noniid.api.split import Split, check_data
from fedml_noniid.pipelines.experiment import tuning
from fedml_noniid.pipelines.experiment.config import ChooseSettings
from fedml_noniid.pipelines.tools import racing
from fedml_noniid.pipelines.tools.racing import Accuracies, Decision, Heat
from fedml_noniid.plugins.core.options import unknown, validated
from fedml_noniid.plugins.engines.simulation import drive

RACE = ("grid", "seeds", "fresh", "eta", "finalists")
HELD_OUT = 0.1  # of the training samples, for validation


@dataclass(frozen=True, eq=False, repr=False)
class Choice:
    """Holds the method to take, and the evidence. Accuracies in data frames are fractions.

    >>> import fedml_noniid as nd
    >>> how = {"partition": "dirichlet", "clients": 5, "alpha": 0.5, "rounds": 2}
    >>> race = {"seeds": [10], "fresh": [20, 21], "grid": {"train": {"lr": [0.1]}}}
    >>> choice = nd.choose(nd.load("digits"), ["fednova"], race=race, **how)
    >>> choice.values
    {'train': {'lr': 0.1}}
    >>> sorted(choice.heats["recipe"])
    ['fedavg', 'fednova']
    """

    decision: Decision

    @property
    def recipe(self) -> str:
        """The name of the recipe to take."""
        return self.decision.taken.recipe

    @property
    def values(self) -> dict[str, dict[str, Any]]:
        """Its values that were chosen, as in an entry of `recipes`: `{"train": {"lr": 0.3}}`."""
        return {section: dict(keys) for section, keys in self.decision.taken.values.items()}

    @property
    def sentence(self) -> str:
        """What to take, and by how much it is better than FedAvg, with its interval."""
        return self.decision.sentence

    @cached_property
    def heats(self) -> pd.DataFrame:
        """A line for each candidate of each heat, on the validation split."""
        return racing.frame_of_heats(self.decision)

    @cached_property
    def final(self) -> pd.DataFrame:
        """FedAvg and the recipes that met it, on the test split, over fresh seeds."""
        return racing.frame_of_final(self.decision)

    def __repr__(self) -> str:
        return self.decision.text


@in_turn()
def choose(
    data: Data | Split,
    recipes: Sequence[str] | Mapping[str, Mapping[str, Any]] = racing.RECIPES,
    *,
    race: Mapping[str, Any] | None = None,
    processes: int = 1,
    progress: bool = True,
    folder: str | Path | None = None,
    **options: Any,
) -> Choice:
    """Races recipes on the validation split, and compares the best with FedAvg on the test split.

    `recipes`: as in `sweep`; FedAvg always takes part. `race`: settings of the race, all of which
    may be left out: `grid` (the values to try, such as `{"train": {"lr": [0.03, 0.1]}}`, by default
    a third of `lr`, `lr`, and three times `lr`), `seeds` (a heat for each), `fresh` (seeds of the
    final), `eta` (after a heat, one in `eta` goes on), `finalists`. The other arguments are those
    of `run`. `validation` is 0.1 by default.

    UserError for mistakes in the arguments, and if FedAvg diverges at all of its values.

    >>> import fedml_noniid as nd
    >>> how = {"partition": "dirichlet", "clients": 5, "alpha": 0.1, "rounds": 4}
    >>> race = {"seeds": [10, 11], "fresh": [20, 21]}
    >>> choice = nd.choose(nd.load("digits"), ["scaffold", "fednova"], race=race, **how)
    >>> choice.recipe in ("fedavg", "scaffold", "fednova")
    True
    >>> choice.final["recipe"].iloc[0]
    'fedavg'
    """
    where = "choose"
    check_data(where, data, Data, Split)
    given = {"seeds": [0], "processes": processes, **options}
    if isinstance(data, Data):
        given.setdefault("validation", HELD_OUT)
    callbacks, given = running.callbacks_of(where, given)
    entries = running.entries_of(where, recipes)
    config = running.settings_of(where, data, entries, given, "")
    with settings.arguments(where):
        for key in race or {}:
            unknown((), key, RACE)
        wanted = validated(ChooseSettings, settings.plain(race or {}))
        config = config.model_copy(update={"choose": wanted})
        racing.tried(config)

    def answer(heat: Heat) -> Accuracies:
        laid = heat.laid_out(config)
        units = [(laid, unit) for unit in laid.units()]
        made = running.executed(where, data, units, callbacks, progress, folder)
        reached: dict[str, list[float]] = {entry: [] for entry in laid.recipe_names}
        for (_, unit), files in zip(units, made, strict=True):
            if isinstance(files, Files):
                final = json.loads(files.run["run.json"])["final"]
                if heat.column not in final:
                    raise tuning.not_defined(where, unit.recipe, heat.column)
                reached[unit.recipe].append(final[heat.column])
        whole = {entry for entry, found in reached.items() if len(found) == len(heat.seeds)}
        return {entry: found if entry in whole else () for entry, found in reached.items()}

    whole = data.data if isinstance(data, Split) else data
    return Choice(drive(racing.race(config, len(whole.dataset.test_y)), answer))
