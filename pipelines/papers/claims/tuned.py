"""Tuned studies: every method tries equally many values on the validation split, then all seeds run
with the best.

A study of claims.yaml with a section `tune`, as params.yaml has it, is tuned. The trials lie in
papers/tune. The seeds of the trials are none of the study's.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedml_noniid.pipelines.experiment import config, tuning
from fedml_noniid.pipelines.experiment.tuning import Trial
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.papers.claims.trials import FILE
from fedml_noniid.pipelines.papers.studies import Study
from fedml_noniid.pipelines.papers.study import prepared, workspace
from fedml_noniid.pipelines.stages.tune import tried
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.files import write_whole


def settled(place: Workspace, study: Study) -> Study:
    """The study with the best values of each method, after the trials that are missing.

    UserError for a bad grid.

    A study without a section `tune` stays as it is, and so does one of size small without data:
    `execute` says so.
    """
    if "tune" not in study.content:
        return study
    trials = replace(study, kind="tune")
    own = workspace(place, trials)
    write_whole(own.root / config.FILE, trials.yaml(place.root))
    settings = config.load(own.root)
    try:
        prepared(own, settings.data)
    except UserError:
        if study.size != "small":
            raise
        return replace(
            study, content={key: value for key, value in study.content.items() if key != "tune"}
        )
    scenario = tuning.scenario_of(settings)
    found = tried(own, settings, [scenario], f"{study.paper} {study.name}, tuning")[scenario]
    ranked = {recipe: tuning.ranked(trials_) for recipe, trials_ in found.items()}
    content = copy.deepcopy(dict(study.content))
    seeds = content.pop("tune")["seeds"]
    for recipe, order in ranked.items():
        content["recipes"][recipe] = _with(content["recipes"][recipe], order[0])
    said = {
        recipe: [[trial.point.words, _mean(trial), " ".join(map(str, seeds))] for trial in order]
        for recipe, order in ranked.items()
    }
    write_whole(place.root / study.folder / FILE, json.dumps(said, indent=1, sort_keys=True) + "\n")
    return replace(study, content=content)


def _with(entry: Mapping[str, Any] | None, best: Trial) -> dict[str, Any]:
    """A recipe's entry with the values of a trial. UserError if even the best diverged."""
    if best.mean is None:
        raise UserError(
            f"claims.yaml: tune: all trials of {best.point.recipe} diverged; add smaller values "
            "of train.lr"
        )
    found = copy.deepcopy(dict(entry or {}))
    for section, keys in best.point.values.items():
        found[section] = (found.get(section) or {}) | keys
    return found


def _mean(trial: Trial) -> float | None:
    return None if trial.mean is None else round(trial.mean, 6)
