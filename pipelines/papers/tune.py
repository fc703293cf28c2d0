"""Tunes studies of a paper, for `noniid papers tune` and for claims.

`grids` in pipelines/papers/<paper>/params.yaml has a section `tune` for a study, as the
repository's params.yaml has. It says what the study's recipes try, on each of the study's
scenarios. The test set plays no part, unless `on` asks for it to reproduce a paper that chose so.
The page papers/built/tune/<paper>-<size>/<study>-<split>.md says so then.

A study of claims.yaml with a section `tune` is tuned too: every method tries equally many values on
the validation split, then all seeds run with the best. The seeds of the trials are none of the
study's.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedml_noniid.pipelines.experiment import config, tuning
from fedml_noniid.pipelines.experiment.tuning import SPLITS
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.papers import studies, study
from fedml_noniid.pipelines.papers.words import plus_minus
from fedml_noniid.pipelines.reporting.pages import render
from fedml_noniid.pipelines.reporting.summary import spread
from fedml_noniid.pipelines.stages.tune import tried
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.checks import known
from fedml_noniid.plugins.data.files import write_whole
from fedml_noniid.plugins.data.yaml_files import read_yaml

VALIDATION = 0.1  # fraction of the training set, where the study holds none out


def tune(place: Workspace, paper: str, name: str, size: str, on: str = SPLITS[0]) -> Path:
    """Tunes the recipes of a study at a size. Returns the page with all trials. Raises UserError.

    `on`: the split that decides. `test` is a leak.
    """
    known("split", on, SPLITS)
    one = grid_of(paper, name, size, place.root)
    inside, settings = _opened(place, one)
    study.prepared(inside, settings.data)
    found = tried(inside, settings, settings.scenario_names, f"{paper} {name}, tuning", on)
    rows = [["recipe", "scenario", "settings", f"{on} accuracy, %", "chosen"]]
    for scenario, by_recipe in found.items():
        for recipe, trials in by_recipe.items():
            for rank, trial in enumerate(tuning.ranked(trials)):
                reached = spread(100 * accuracy for accuracy in trial.accuracies)
                accuracy = plus_minus(reached) if reached else "diverges"
                best = "" if rank else "best"
                rows.append([recipe, scenario, trial.point.words, accuracy, best])
    page = place.root / one.folder.parent / f"{name}-{on}.md"
    write_whole(page, render("tune.md.j2", {"study": one, "on": on, "rows": rows}))
    return page


def grid_of(paper: str, name: str, size: str, root: Path) -> studies.Study:
    """A study with its grid as its section `tune`."""
    found = studies.of_paper(paper, size, root)
    whole = found[known(f"study of {paper}", name, found)]
    grids = read_yaml(studies.folder_of(paper, root) / config.FILE).get("grids") or {}
    grid = grids[known("study with a grid", name, grids)]
    if not whole.is_run:
        raise UserError(f"{paper}, {name}: is not run at size {size}; allowed: another size")
    data = dict(whole.content["data"])
    data["validation"] = data.get("validation") or VALIDATION
    return replace(whole, content={**whole.content, "data": data, "tune": grid}, kind="tune")


def tuned(place: Workspace, one: studies.Study) -> studies.Study:
    """A claim's study with the best values of each method, after the trials that are missing.

    UserError for a bad grid. A study without a section `tune` stays as it is, and so does one of
    size small without data: `execute` says so.
    """
    if "tune" not in one.content:
        return one
    content = copy.deepcopy(dict(one.content))
    seeds = " ".join(map(str, content.pop("tune")["seeds"]))
    inside, settings = _opened(place, replace(one, kind="tune"))
    try:
        study.prepared(inside, settings.data)
    except UserError:
        if one.size != "small":
            raise
        return replace(one, content=content)
    scenario, title = tuning.scenario_of(settings), f"{one.paper} {one.name}, tuning"
    found = tried(inside, settings, [scenario], title)[scenario]
    record: dict[str, list[list[Any]]] = {}
    for recipe, trials in found.items():
        best, *_ = ranked = tuning.ranked(trials)
        if best.mean is None:
            raise UserError(
                f"claims.yaml: tune: all trials of {recipe} diverged; add smaller values of "
                "train.lr"
            )
        entry = copy.deepcopy(dict(content["recipes"][recipe] or {}))
        for section, keys in best.point.values.items():
            entry[section] = (entry.get(section) or {}) | keys
        content["recipes"][recipe] = entry
        means = [None if trial.mean is None else round(trial.mean, 6) for trial in ranked]
        record[recipe] = [
            [trial.point.words, mean, seeds] for trial, mean in zip(ranked, means, strict=True)
        ]
    text = json.dumps(record, indent=1, sort_keys=True) + "\n"
    write_whole(place.root / one.folder / studies.TUNED, text)
    return replace(one, content=content)


def _opened(place: Workspace, one: studies.Study) -> tuple[Workspace, config.Config]:
    """The study's folders, with its params.yaml, and its settings."""
    inside = study.workspace(place, one)
    write_whole(inside.root / config.FILE, one.yaml(place.root))
    return inside, config.load(inside.root)
