"""Chooses a method for one's own data in this process, as `noniid choose` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from safetensors.torch import load

from fedml_noniid.api import running, settings
from fedml_noniid.api.data import Data
from fedml_noniid.api.process import in_turn
from fedml_noniid.api.split import Split, check_data, without_unseen
from fedml_noniid.core.options import unknown, validated
from fedml_noniid.data.indices import Indices
from fedml_noniid.engines.simulation import drive
from fedml_noniid.pipelines.experiment.config import ChooseSettings, Config, Unit
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.owner_scores import scores_of_owners
from fedml_noniid.pipelines.experiment.results import numbers
from fedml_noniid.pipelines.experiment.search import Answers, Request, choosing
from fedml_noniid.pipelines.reporting.decision import RECIPES, Decision, decide

SEARCH = ("grid", "seeds", "fresh", "finalists")
HELD_OUT = 0.1  # of the training samples, for validation


@dataclass(frozen=True, eq=False, repr=False)
class Choice:
    """Holds the method to take, and the evidence. Accuracies in data frames are fractions.

    >>> import fedml_noniid as nd
    >>> how = {"partition": "dirichlet", "clients": 5, "alpha": 0.5, "rounds": 2}
    >>> search = {"seeds": [10], "fresh": [20, 21], "grid": {"train": {"lr": [0.1]}}}
    >>> choice = nd.choose(nd.load("digits"), ["fednova"], search=search, **how)
    >>> choice.values
    {'train': {'lr': 0.1}}
    >>> sorted(choice.rungs["recipe"])
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
    def rungs(self) -> pd.DataFrame:
        """A line for each candidate of each rung, on the validation split."""
        return pd.DataFrame(self.decision.result.table(self.decision.metric))

    @cached_property
    def final(self) -> pd.DataFrame:
        """FedAvg and the recipes that met it, on the test split, over fresh seeds."""
        return pd.DataFrame(self.decision.table)

    def __repr__(self) -> str:
        return self.decision.text


@in_turn()
def choose(
    data: Data | Split,
    recipes: Sequence[str] | Mapping[str, Mapping[str, Any]] = RECIPES,
    *,
    search: Mapping[str, Any] | None = None,
    processes: int = 1,
    progress: bool = True,
    folder: str | Path | None = None,
    **options: Any,
) -> Choice:
    """Tunes recipes on the validation split, and compares the best with FedAvg on the test split.

    `recipes`: as in `sweep`; FedAvg always takes part. `search`: settings that may be left out:
    `grid` (the values to try, such as `{"train": {"lr": [0.03, 0.1]}}`, by default a third of `lr`,
    `lr`, and three times `lr`), `seeds` (of the search), `fresh` (seeds of the final), `finalists`.
    The other arguments are those of `run`. `validation` is 0.1 by default.

    Recipes with a model per client, such as finetune and fedper, take part where the partition goes
    by owner: all are then judged on the samples of the clients' owners.

    UserError for mistakes in the arguments, and if FedAvg diverges.

    >>> import fedml_noniid as nd
    >>> how = {"partition": "dirichlet", "clients": 5, "alpha": 0.1, "rounds": 4}
    >>> search = {"seeds": [10, 11], "fresh": [20, 21]}
    >>> choice = nd.choose(nd.load("digits"), ["scaffold", "fednova"], search=search, **how)
    >>> choice.recipe in ("fedavg", "scaffold", "fednova")
    True
    >>> choice.final["recipe"].iloc[0]
    'fedavg'
    """
    caller = "choose"
    check_data(caller, data, Data, Split)
    options = {"seeds": [0], "processes": processes, **options}
    if isinstance(data, Data):
        options.setdefault("validation", HELD_OUT)
    data = data if isinstance(data, Split) else without_unseen(caller, data, options)
    callbacks, options = running.callbacks_of(caller, options)
    entries = running.entries_of(caller, recipes)
    config = running.settings_of(caller, data, entries, options, "")
    with settings.arguments(caller):
        for key in search or {}:
            unknown((), key, SEARCH)
        wanted = validated(ChooseSettings, settings.plain(search or {}))
        plan = choosing(config.model_copy(update={"choose": wanted}))

    whole = data.data if isinstance(data, Split) else data

    def item_of(config: Config, unit: Unit, known: dict[str, Indices]) -> Item:
        indices = running.indices_of(data, config, unit, known)
        return Item.from_parts(config, unit, whole.dataset, indices)

    def answer(request: Request) -> Answers:
        laid_out = plan.laid_out(request)
        units = [(laid_out, unit) for unit in laid_out.units()]
        ended = running.executed(caller, data, units, callbacks, progress, folder)
        indices = dict[str, Indices]()
        finals: dict[str, list[dict[str, float]]] = {entry: [] for entry in laid_out.recipe_names}
        for (_, unit), files in zip(units, ended, strict=True):
            if files.reason:
                continue
            scores = files.final
            if plan.is_by_owner:
                item = item_of(laid_out, unit, indices).ended(len(files.seconds))
                tensors = load(files.run["model.safetensors"])
                scores = scores_of_owners(item, {k: x.to(item.device) for k, x in tensors.items()})
            finals[unit.recipe].append(numbers(scores))
        return {e: own if len(own) == len(request.seeds) else [] for e, own in finals.items()}

    with settings.arguments(caller):
        sizes = plan.sizes(item_of(config, config.units()[0], {}))
        return Choice(drive(decide(plan, *sizes), answer))
