"""Hyper-parameters of a study by grid, chosen on the validation split -> papers/tune/<paper>-<size>/.

    python -m fedml_noniid.pipelines.papers.tune --paper fednnnn --study mnist-iid-b --size smoke --on validation

`grids` in pipelines/papers/<paper>/params.yaml: study -> {train: {key: [values]}, recipes: {entry: {method: {key:
[values]}}}}.
Every point is an entry of a study of its own. So it is trained once, resumed and tracked like every other item.
The test set plays no part, unless `--on test` asks for it to reproduce a paper that chose so. The output says so then.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fedml_noniid.pipelines import cli
from fedml_noniid.pipelines.experiment import results
from fedml_noniid.pipelines.experiment.config import read_yaml
from fedml_noniid.pipelines.experiment.results import Result
from fedml_noniid.pipelines.experiment.workspace import Workspace
from fedml_noniid.pipelines.papers import studies, study
from fedml_noniid.pipelines.reporting.summary import Spread, spread
from fedml_noniid.pipelines.reporting.text import markdown
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.checks import known
from fedml_noniid.plugins.data.files import write_whole

log = logging.getLogger(__name__)
VALIDATION = 0.1  # share of the training set, where the study holds none out
SPLITS = ("validation", "test")


class Point(NamedTuple):
    """One point of a grid."""

    study: studies.Study  # the one that trains it
    recipe: str  # the study's entry that is tuned
    entry: str  # its name in that study
    settings: str  # in words


def run(options: argparse.Namespace, place: Workspace) -> None:
    """Runs the grid of a study and writes down what is best."""
    root = place.root
    found = studies.of_paper(options.paper, options.size, root)
    chosen = found[known(f"study of {options.paper}", options.study, found)]
    grids = read_yaml(studies.folder_of(options.paper, root) / "params.yaml").get("grids") or {}
    points = list(expanded(chosen, grids[known("study with a grid", options.study, grids)]))
    for one in {point.study.name: point.study for point in points}.values():
        study.execute(place, one)
    text = _text(root, chosen, points, options.on)
    path = root / studies.RESULTS / "tune" / f"{options.paper}-{options.size}" / f"{chosen.name}-{options.on}.md"
    write_whole(path, text)
    sys.stdout.write(f"{text}\n{path}\n")


def expanded(whole: studies.Study, grid: Mapping[str, Any]) -> Iterator[Point]:
    """Every point: for each setting of `train` a study, in which each recipe has an entry per setting of its own."""
    for key in grid:
        known(f"grid of {whole.name}", key, ("train", "recipes"))
    content, data = whole.content, dict(whole.content["data"])
    data["validation"] = data.get("validation") or VALIDATION
    entries = list(_entries(whole, grid.get("recipes") or {name: {} for name in content["recipe_names"]}))
    for number, train in enumerate(_product(grid.get("train") or {})):
        laid = {
            **content,
            "data": data,
            "recipes": {name: entry for _, name, entry, _ in entries},
            "recipe_names": [name for _, name, _, _ in entries],
            "train": {**content["train"], **train},
            "experiment": f"{content['experiment']}-tune",
            "deploy": {**content["deploy"], "recipe": entries[0][1]},
        }
        one = replace(whole, name=f"{whole.name}-{number}", content=laid, kind="tune")
        shared = [f"{key} {value}" for key, value in train.items()]
        for recipe, name, _, words in entries:
            yield Point(one, recipe, name, ", ".join([*words, *shared]) or "as it is")


def _entries(whole: studies.Study, tuned: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any], list[str]]]:
    """(recipe, name of the entry, the entry, its own settings in words) of each point of each recipe's grid."""
    recipes = whole.content["recipes"]
    for recipe, axes in tuned.items():
        base = recipes[known(f"grid of {whole.name}: recipe", recipe, recipes)]
        flat = {(method, key): values for method, keys in axes.items() for key, values in keys.items()}
        for place, point in enumerate(_product(flat)):
            entry = {"recipe": recipe, **copy.deepcopy(dict(base))}
            for (method, key), value in point.items():
                entry.setdefault(method, {})[key] = value
            yield recipe, f"{recipe}-{place}", entry, [f"{method}.{key} {v}" for (method, key), v in point.items()]


def _product(axes: Mapping[Any, Sequence[Any]]) -> Iterator[dict[Any, Any]]:
    """Every combination of one value per key; one empty combination for no keys."""
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"grid: {key} = {values!r} is refused; allowed: a list of values")
    for values in itertools.product(*axes.values()):
        yield dict(zip(axes, values, strict=True))


def _text(root: Path, whole: studies.Study, points: Sequence[Point], on: str) -> str:
    """The grid as a table, the best point of each recipe and scenario first."""
    found = {point.study.name: point.study.folder for point in points}
    runs: dict[str, list[Result]] = {name: results.read(root / folder, root) for name, folder in found.items()}
    rows = [["recipe", "scenario", "settings", f"{on} accuracy, %", "chosen"]]
    for scenario in whole.content["scenario_names"]:
        for recipe in dict.fromkeys(point.recipe for point in points):
            scored = []
            for point in points:
                if point.recipe == recipe:
                    own = [r for r in runs[point.study.name] if (r.scenario, r.recipe) == (scenario, point.entry)]
                    value = spread(r.column(f"{on}_accuracy")[-1] for r in own)
                    if value is not None:
                        scored.append((point, value))
            scored.sort(key=lambda pair: -pair[1].mean)
            rows += [
                [recipe, scenario, point.settings, _percent(value), "best" if place == 0 else ""]
                for place, (point, value) in enumerate(scored)
            ]
    warning = "CHOSEN ON THE TEST SET: a leak, only to reproduce a paper that did so.\n\n" if on == "test" else ""
    return f"# {whole.paper}, {whole.name}: grid at size {whole.size}\n\n{warning}{markdown(rows)}\n"


def _percent(value: Spread) -> str:
    return f"{100 * value.mean:.2f}" + ("" if value.std is None else f" ± {100 * value.std:.2f}")


def main(arguments: Sequence[str]) -> int:
    """The command line; returns the exit code."""
    parser = cli.parser("fedml_noniid.pipelines.papers.tune", __doc__)
    for option in ("paper", "study", "size"):
        parser.add_argument(f"--{option}", required=True)
    parser.add_argument("--on", choices=SPLITS, default=SPLITS[0])
    return cli.guarded(run, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
