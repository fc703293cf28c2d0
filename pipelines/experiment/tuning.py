"""Tuning: which values each recipe tries, which are best, and the record of it in params.yaml.

A trial is one point of a recipe's grid, trained on every seed of `tune`. The grid is the product of
the values for `train` and for the hyper-parameters of the recipe's methods. With `trials` every
recipe tries that many points of its grid, drawn without replacement. So a method with more
hyper-parameters has no more chances than another one. (Dodge, Gururangan, Card, Schwartz, Smith:
Show Your Work: Improved Reporting of Experimental Results, EMNLP 2019,
https://arxiv.org/abs/1909.03004. Bergstra, Bengio: Random Search for Hyper-Parameter Optimization,
JMLR 13, 2012, https://jmlr.org/papers/v13/bergstra12a.html.)

The best point has the highest accuracy on the validation split after the last round, averaged over
seeds. The first of the grid wins a tie. The seeds are not those of the experiment, and the test set
plays no part.
"""

from __future__ import annotations

import copy
import io
import itertools
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap
from ruamel.yaml.util import load_yaml_guess_indent

from fedml_noniid.pipelines.experiment.config import (
    FILE,
    Axes,
    Config,
    Recipe,
    Tuned,
    TuneSettings,
    Values,
)
from fedml_noniid.pipelines.experiment.provenance import digest
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.files import write_whole

WIDTH = 120  # of params.yaml
# Settings of `train` that choose no values: how a machine computes, and what it also measures.
OF_MACHINE = {"engine", "device", "threads", "observe", "evaluate_every"}
EXAMPLE = "tune: {trials: 3, seeds: [100], grid: {train: {lr: [0.03, 0.1, 0.3]}}}"


class Point(NamedTuple):
    """One trial."""

    recipe: str
    entry: str  # its name among the entries that are trained
    values: Values

    @property
    def words(self) -> str:
        """`lr 0.1, fnr.p 0.5`."""
        return in_words(self.values) or "as it is"


class Trial(NamedTuple):
    """A point and its outcome."""

    point: Point
    accuracies: tuple[float, ...]  # by seed; empty if a seed diverged

    @property
    def mean(self) -> float | None:
        """None for a diverged trial."""
        return statistics.fmean(self.accuracies) if self.accuracies else None


def in_words(values: Mapping[str, Mapping[str, Any]]) -> str:
    """`lr 0.1, fnr.p 0.5`: those of `train` by their key alone."""
    flat = [
        (section, key, value) for section, keys in values.items() for key, value in keys.items()
    ]
    return ", ".join(
        f"{key if section == 'train' else f'{section}.{key}'} {value}"
        for section, key, value in flat
    )


def points(settings: Config) -> dict[str, list[Point]]:
    """Recipe -> the points that it tries, in the order of its grid.

    A recipe with a single point has nothing to choose and is left out. With `trials` it is an
    error, as is every grid of fewer points.
    """
    tune, found, errors = wanted(settings), {}, []
    tuned = tune.recipes or settings.recipe_names
    if not settings.data.validation:
        errors.append(
            "tune: data.validation = 0 leaves no samples to choose values on; allowed: above 0"
        )
    for name in tuned:
        axes, grid = grid_of(settings, name, tune.grid)
        if tune.trials is not None and len(grid) < tune.trials:
            listed = (
                ", ".join(
                    key if section == "train" else f"{section}.{key}" for section, key in axes
                )
                or "no key"
            )
            errors.append(
                f"tune.grid: {name} has {len(grid)} points ({listed}), "
                f"{tune.trials - len(grid)} fewer than "
                f"tune.trials = {tune.trials}; add values, or lower tune.trials"
            )
        elif len(grid) > 1:
            found[name] = _drawn(grid, tune)
    if not found and not errors:
        errors.append(
            "tune.grid has one point for each recipe, so there is nothing to choose; add values"
        )
    if errors:
        raise UserError("\n".join(f"{FILE}: {error}" for error in errors))
    return found


def grid_of(
    settings: Config, name: str, grid: Axes
) -> tuple[dict[tuple[str, str], list[Any]], list[Point]]:
    """(key -> values, points) of a recipe: the product of the values of its own sections."""
    methods = settings.methods_of(name)
    axes = {
        (section, key): values
        for section, keys in grid.items()
        if section == "train" or section in methods
        for key, values in keys.items()
    }
    every = itertools.product(*axes.values())
    return axes, [_point(name, dict(zip(axes, values, strict=True))) for values in every]


def not_defined(where: str, entry: str, column: str) -> UserError:
    """The error for a run without a number by which it could be chosen."""
    words = f"{column.replace('_', ' ')} of {entry} is not defined"
    return UserError(f"{where}: {words}", allowed="more samples, or others")


def wanted(settings: Config) -> TuneSettings:
    """The section `tune`. UserError if params.yaml has none."""
    if settings.tune is None:
        raise UserError(f"{FILE}: tune is missing: what to try; for example {EXAMPLE}")
    return settings.tune


def laid_out(
    settings: Config,
    found: Sequence[Point],
    what: str,
    scenario: str,
    seeds: Sequence[int],
    rounds: int | None = None,
) -> Config:
    """The experiment that trains the points: an entry per point, with these seeds.

    `what` ends its name. `rounds`: of each training, by default those of `train`.
    """
    entries = {point.entry: _entry(settings.recipes[point.recipe], point) for point in found}
    changed = {
        "experiment": f"{settings.experiment}-{what}",
        "scenario_names": [scenario],
        "seeds": list(seeds),
        "recipes": settings.recipes | entries,
        "recipe_names": list(entries),
        "tune": None,
        "train": settings.train.model_copy(update={"rounds": rounds or settings.train.rounds}),
    }
    return settings.model_copy(update=changed)


def ranked(trials: Sequence[Trial]) -> list[Trial]:
    """The best first. Diverged trials are the last."""
    return sorted(trials, key=lambda trial: (trial.mean is None, -(trial.mean or 0.0)))


def record(settings: Config, trials: Sequence[Trial], samples: int) -> Tuned:
    """How the best of a recipe's trials was chosen.

    UserError if all of them diverged. `samples`: of validation.
    """
    tune, order, recipe = wanted(settings), ranked(trials), trials[0].point.recipe
    best, second = order[0], order[1].mean if len(order) > 1 else None
    if best.mean is None:
        raise UserError(
            f"{FILE}: tune: all {len(trials)} trials of {recipe} diverged; add smaller values "
            "of train.lr"
        )
    tried: Axes = {section: {} for section in best.point.values}
    for section, key, _ in _places(best.point):
        had = {repr(trial.point.values[section][key]) for trial in trials}
        tried[section][key] = [value for value in tune.grid[section][key] if repr(value) in had]
    return Tuned(
        chosen=copy.deepcopy(best.point.values),
        trials=len(trials),
        tried=tried,
        diverged=sum(trial.mean is None for trial in trials),
        scenario=scenario_of(settings),
        seeds=list(tune.seeds),
        metric=settings.train.built_loss.metric,
        validation=round(best.mean, 6),
        runner_up=None if second is None else round(second, 6),
        samples=samples,
        settings=fingerprint(settings, recipe, best.point.values, scenario_of(settings)),
    )


def scenario_of(settings: Config) -> str:
    """The scenario on which `tune` chooses."""
    return wanted(settings).scenario or settings.scenario_names[0]


def fingerprint(settings: Config, recipe: str, chosen: Values, scenario: str) -> str:
    """Hash of the settings under which values were chosen: data, scenario, training, the recipe's
    other values."""
    others = {
        section: {key: value for key, value in keys.items() if key not in chosen.get(section, {})}
        for section, keys in settings.recipes[recipe].values.items()
    }
    train = settings.train.model_dump(exclude=OF_MACHINE | set(chosen.get("train", {})))
    place = settings.scenarios[scenario].model_dump() if scenario in settings.scenarios else None
    parts = (
        settings.data.model_dump(exclude={"root"}),
        place,
        train,
        settings.composition(recipe),
        {section: keys for section, keys in others.items() if keys},
    )
    return digest(*parts)


def write(root: Path, found: Mapping[str, Tuned]) -> None:
    """Writes the chosen values and how they were chosen into the entries of params.yaml.

    Its comments stay.
    """
    path = root / FILE
    text = path.read_text()
    _, indent, offset = load_yaml_guess_indent(text)
    yaml = YAML()
    yaml.width, yaml.preserve_quotes = WIDTH, True
    yaml.indent(mapping=2, sequence=indent or 2, offset=offset or 0)
    yaml.representer.add_representer(
        type(None), lambda r, _: r.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    content, written = yaml.load(text), io.StringIO()
    for name, tuned in found.items():
        _put(content["recipes"], name, tuned)
    yaml.dump(content, written, transform=lambda text: text.replace(", \n", ",\n"))
    # ruamel keeps comments, but a file may be laid out in a way that it does not write back.
    if YAML(typ="safe", pure=True).load(written.getvalue()) != content:
        raise UserError(
            f"{FILE}: the chosen values can't be written into it; write each entry of recipes "
            "on one line"
        )
    write_whole(path, written.getvalue())


def _point(recipe: str, flat: Mapping[tuple[str, str], Any]) -> Point:
    """A point whose name depends on its values alone, so that a larger grid trains only what is
    new."""
    values: Values = {}
    for (section, key), value in flat.items():
        values.setdefault(section, {})[key] = value
    return Point(recipe, f"{recipe[:80]}-{digest(recipe, values)[:8]}", values)


def _drawn(grid: Sequence[Point], tune: TuneSettings) -> list[Point]:
    """`trials` points without replacement.

    Each point adds the values that were drawn least, and a hash breaks ties.

    So no value is missing where another one comes twice, and more trials keep the points of fewer.
    """
    if tune.trials is None:
        return list(grid)
    left = sorted(grid, key=lambda point: digest(tune.seeds[0], point.values))
    drawn: list[Point] = []
    times: Counter[tuple[str, str, str]] = Counter()

    def repeats(point: Point) -> float:
        return sum(times[place] * len(tune.grid[place[0]][place[1]]) for place in _places(point))

    for _ in range(tune.trials):
        fresh = min(left, key=repeats)
        times.update(_places(fresh))
        left.remove(fresh)
        drawn.append(fresh)
    return [point for point in grid if point in drawn]


def _places(point: Point) -> list[tuple[str, str, str]]:
    """(section, key, value as text) of all its values."""
    return [
        (section, key, repr(value))
        for section, keys in point.values.items()
        for key, value in keys.items()
    ]


def _entry(recipe: Recipe, point: Point) -> Recipe:
    """The recipe's entry with the values of a point."""
    entry: dict[str, Any] = {"recipe": recipe.recipe or point.recipe, **recipe.values}
    for section, keys in point.values.items():
        entry[section] = entry.get(section, {}) | keys
    return Recipe.model_validate(entry)


def _put(entries: CommentedMap, name: str, tuned: Tuned) -> None:
    """One entry with its new values, a line per section."""
    # A copy: an alias may stand for the entry, or for a section, elsewhere too.
    entry = CommentedMap() if entries[name] is None else _copied(entries[name])
    for section, keys in tuned.chosen.items():
        if entry.get(section):
            entry[section] = _copied(entry[section])
            entry[section].update(keys)
        else:
            entry[section] = _flow(keys)
    record = tuned.model_dump()
    entry["tuned"] = CommentedMap({key: _flow(value) for key, value in record.items()})
    entry.fa.set_block_style()
    entries[name] = entry


def _copied(old: CommentedMap) -> CommentedMap:
    """A copy without the name that aliases have for it."""
    new = copy.copy(old)
    new.yaml_set_anchor(None)
    return new


def _flow(value: object) -> Any:
    """A value that is written on one line."""
    return YAML().load(in_one_line(value))


def in_one_line(value: object) -> str:
    """A value in YAML, on one line."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.width = True, sys.maxsize
    yaml.sort_base_mapping_type_on_output = False
    text = io.StringIO()
    yaml.dump({"v": value}, text)
    return text.getvalue().strip()[len("{v: ") : -1]
