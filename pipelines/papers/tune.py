"""Tunes a paper's study: `noniid papers tune`.

The page is papers/built/tune/<paper>-<size>/<study>-<split>.md.

`grids` in pipelines/papers/<paper>/params.yaml has a section `tune` for a study, as the
repository's params.yaml has. It says what the study's recipes try, on each of the study's
scenarios. The test set plays no part, unless `on` asks for it to reproduce a paper that chose so.
The page says so then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedml_noniid.pipelines.experiment import config, tuning
from fedml_noniid.pipelines.experiment.tuning import SPLITS, Trial
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.papers import studies, study
from fedml_noniid.pipelines.reporting.summary import Spread, spread
from fedml_noniid.pipelines.reporting.text import markdown
from fedml_noniid.pipelines.stages.tune import tried
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.checks import known
from fedml_noniid.plugins.data.files import write_whole
from fedml_noniid.plugins.data.yaml_files import read_yaml

VALIDATION = 0.1  # share of the training set, where the study holds none out


def tune(place: Workspace, paper: str, name: str, size: str, on: str = SPLITS[0]) -> Path:
    """Tunes the recipes of a study at a size. Returns the page with all trials. Raises UserError.

    `on`: the split that decides. `test` is a leak.
    """
    known("split", on, SPLITS)
    one = grid_of(paper, name, size, place.root)
    own = study.workspace(place, one)
    write_whole(own.root / config.FILE, one.yaml(place.root))
    settings = config.load(own.root)
    study.prepared(own, settings.data)
    found = tried(own, settings, settings.scenario_names, f"{paper} {name}, tuning", on)
    page = place.root / one.folder.parent / f"{name}-{on}.md"
    write_whole(page, _text(one, found, on))
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


def _text(one: studies.Study, found: Mapping[str, Mapping[str, Sequence[Trial]]], on: str) -> str:
    """All trials as a table, the best of each recipe and scenario first."""
    rows = [["recipe", "scenario", "settings", f"{on} accuracy, %", "chosen"]]
    for scenario, by_recipe in found.items():
        for recipe, trials in by_recipe.items():
            rows += [
                [
                    recipe,
                    scenario,
                    trial.point.words,
                    _percent(spread(trial.accuracies)),
                    "best" if place == 0 else "",
                ]
                for place, trial in enumerate(tuning.ranked(trials))
            ]
    warning = (
        "CHOSEN ON THE TEST SET: a leak, only to reproduce a paper that did so.\n\n"
        if on == "test"
        else ""
    )
    return f"# {one.paper}, {one.name}: grid at size {one.size}\n\n{warning}{markdown(rows)}\n"


def _percent(value: Spread | None) -> str:
    if value is None:
        return "diverges"
    return f"{100 * value.mean:.2f}" + ("" if value.std is None else f" ± {100 * value.std:.2f}")
