"""Searches the best values of each recipe on the validation split: for `tune` and for `choose`.

Successive halving (Jamieson, Talwalkar: Non-stochastic Best Arm Identification and Hyperparameter
Optimization, AISTATS 2016, https://arxiv.org/abs/1502.07943) over rungs, with seeds as the
resource: the first rung has two seeds, each further one has one more. All trainings have all
rounds, because the best step size of the first rounds is often too large for the rest. So each rung
has a standard error over seeds. With one seed there is none, and the spread over validation samples
says nothing about another partition or other first weights: no value drops out.

The rank is by the mean validation loss, then by the main metric. The accuracy on a small validation
split has few different values, so it ties, and no tie is broken by position. A value drops out if
it is worse than the best of its recipe by more than one standard error of the paired difference.
All recipes advance equally many values, at least two. Where the best value is the smallest or the
largest that was tried, the grid grows by a point beyond it: at most `MAX_EXTENSIONS` of a recipe.

`tune` may draw `trials` points of each recipe's grid without replacement. So a method with more
hyper-parameters has no more chances than another one. (Dodge, Gururangan, Card, Schwartz, Smith:
Show Your Work: Improved Reporting of Experimental Results, EMNLP 2019,
https://arxiv.org/abs/1909.03004. Bergstra, Bengio: Random Search for Hyper-Parameter Optimization,
JMLR 13, 2012, https://jmlr.org/papers/v13/bergstra12a.html.)
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fedml_noniid.core.algorithm import Algorithm
from fedml_noniid.core.component import HEAD
from fedml_noniid.core.errors import UserError, together
from fedml_noniid.core.options import validated
from fedml_noniid.data.partitions import goes_by_owner
from fedml_noniid.pipelines.experiment import check
from fedml_noniid.pipelines.experiment.config import (
    FILE,
    Axes,
    ChooseSettings,
    Config,
    Recipe,
    Tuned,
    Values,
)
from fedml_noniid.pipelines.experiment.items import Item
from fedml_noniid.pipelines.experiment.owner_scores import samples_of_owners
from fedml_noniid.pipelines.experiment.provenance import digest
from fedml_noniid.pipelines.experiment.values import (
    cells,
    edge,
    edges,
    fingerprint,
    in_words,
    numbers,
)
from fedml_noniid.rates import Rate

BASE = "fedavg"
EXAMPLE = "tune: {trials: 3, seeds: [100], grid: {train: {lr: [0.03, 0.1, 0.3]}}}"
MAX_EXTENSIONS = 2  # points of a recipe beyond its grid
MIN_VALUES = 2  # of each recipe in each rung
Scores = tuple[float, float]  # loss, main metric
COMMON, FINE_TUNED = "one common model", "a common model, fine-tuned at each site"
Answers = Mapping[str, Sequence[Mapping[str, float]]]  # entry -> final by seed; () if it diverged


class Point(NamedTuple):
    """One combination of values of a recipe."""

    recipe: str
    entry: str  # its name among the entries that are trained
    values: Values

    @property
    def description(self) -> str:
        """`lr 0.1, fnr.p 0.5`."""
        return in_words(self.values) or "as it is"

    @property
    def name(self) -> str:
        """`scaffold (lr 0.1)`."""
        return f"{self.recipe} ({self.description})"

    @classmethod
    def from_values(cls, recipe: str, values: Values) -> Point:
        """The point's name depends on its values alone, so a larger grid trains only new points."""
        return cls(recipe, f"{recipe[:80]}-{digest(recipe, values)[:8]}", values)


class Request(NamedTuple):
    """What has to be trained next."""

    name: str  # `rung 1`, `final`
    points: tuple[Point, ...]
    seeds: tuple[int, ...]
    rounds: int

    @property
    def cost(self) -> int:
        """Rounds of training."""
        return len(self.points) * len(self.seeds) * self.rounds


class Trial(NamedTuple):
    """A point in a rung, measured on the validation split."""

    rung: str
    point: Point
    losses: tuple[float, ...]  # by seed; none if it diverged
    metric: float  # the main one, mean over seeds, not scaled

    @classmethod
    def from_scores(cls, request: Request, point: Point, scores: Sequence[Scores]) -> Trial:
        """`scores`: by seed."""
        losses, metrics = zip(*scores, strict=True) if scores else ((), (-math.inf,))
        return cls(request.name, point, losses, statistics.fmean(metrics))

    @property
    def loss(self) -> float:
        """The mean; infinite for a diverged trial."""
        return statistics.fmean(self.losses) if self.losses else math.inf

    @property
    def rank(self) -> tuple[float, float, str]:
        """The least is the best. The name of the entry, a hash of its values, ends a tie."""
        return self.loss, -self.metric, self.point.entry

    def is_worse(self, best: Trial) -> bool:
        """Whether the loss is higher by more than one standard error of the paired difference.

        False with one seed, which has no standard error.
        """
        gaps = [ours - theirs for ours, theirs in zip(self.losses, best.losses, strict=True)]
        n = len(gaps)
        return n > 1 and statistics.fmean(gaps) > statistics.stdev(gaps) / math.sqrt(n)


class Result(NamedTuple):
    """What a search tried, and what came out."""

    trials: tuple[Trial, ...]  # of all rungs, the best of each rung first
    extended: tuple[Point, ...]  # beyond the grids
    rounds: int  # of training

    def ranked(self, recipe: str) -> list[Trial]:
        """The last trial of each point of a recipe: those of the last rung first, the best first.
        Diverged trials are the last."""
        rungs = [trial.rung for trial in self.trials]
        last = {trial.point.entry: trial for trial in self.trials if trial.point.recipe == recipe}
        return sorted(
            last.values(),
            key=lambda trial: (not trial.losses, -rungs.index(trial.rung), trial.rank),
        )

    @property
    def finals(self) -> list[Trial]:
        """The trials of the last rung: all rounds on all seeds. The best first."""
        return _ranked(trial for trial in self.trials if trial.rung == self.trials[-1].rung)

    def table(self, metric: str) -> list[dict[str, Any]]:
        """A line for each point of each rung; of the validation split, not scaled.

        Of the last rung, the best point of each recipe goes on.
        """
        last = {trial.point.entry: trial.rung for trial in self.trials}
        last |= {self.ranked(final.point.recipe)[0].point.entry: "" for final in self.finals}
        return [
            {
                "rung": trial.rung,
                "seeds": len(trial.losses),
                "recipe": trial.point.recipe,
                "values": trial.point.description,
                "validation_loss": trial.loss if trial.losses else None,
                f"validation_{metric}": trial.metric if trial.losses else None,
                "goes_on": last[trial.point.entry] != trial.rung,
            }
            for trial in self.trials
        ]

    def axes(self, recipe: str) -> Axes:
        """All values that a recipe tried."""
        return _axes(trial.point for trial in self.trials if trial.point.recipe == recipe)

    def notes(self, recipes: Collection[str], metric: str, samples: int) -> list[str]:
        """What a reader must know of the best values of these recipes.

        `samples`: of the validation split.
        """
        lines = [
            f"{recipe}: the best was at an edge of the grid; tried beyond it: {tried}."
            for recipe in recipes
            if (
                tried := "; ".join(
                    point.description for point in self.extended if point.recipe == recipe
                )
            )
        ]
        lines += [
            f"{recipe}: {edge} that was tried; a wider `grid` may find better ones."
            for recipe in recipes
            for edge in edges(self.ranked(recipe)[0].point.values, self.axes(recipe))
        ]
        if metric == "accuracy" and samples < 100:
            lines.append(
                f"{samples} validation samples: one of them is {100 / samples:.2f} points of "
                "accuracy. The loss ranks the values."
            )
        return lines


@dataclass(frozen=True)
class Search:
    """Says what is searched: the points of each recipe, and on which scenario and seeds."""

    settings: Config
    kind: str  # the section of params.yaml
    scenario: str
    seeds: Sequence[int]
    points: Mapping[str, Sequence[Point]]  # by recipe
    required: Collection[str]  # recipes that must not diverge at all of their values
    models: Mapping[str, str] = field(default_factory=dict)  # recipe -> what a site gets

    @property
    def is_by_owner(self) -> bool:
        """Whether all are judged on the samples of the clients' owners, as some clients have models
        of their own."""
        return any(model != COMMON for model in self.models.values())

    @property
    def metric(self) -> str:
        """The main metric."""
        return self.settings.train.built_loss.metric

    def sizes(self, item: Item) -> tuple[int, int]:
        """The numbers of validation samples and of test samples that judge."""
        if not self.is_by_owner:
            return len(item.indices.validation), len(item.data.test_y)
        validation, test = (
            sum(len(samples.y) for samples in part) for part in samples_of_owners(item).values()
        )
        return validation, test

    def laid_out(self, request: Request) -> Config:
        """The experiment that trains what is requested: an entry per point."""
        entries = {point.entry: self._entry(point) for point in request.points}
        return self.settings.model_copy(
            update={
                "experiment": f"{self.settings.experiment}-{self.kind}",
                "scenario_names": [self.scenario],
                "seeds": list(request.seeds),
                "recipes": self.settings.recipes | entries,
                "recipe_names": list(entries),
                "tune": None,
                "train": self.settings.train.model_copy(
                    update={"rounds": request.rounds, "until_s": None}
                ),
            }
        )

    def _entry(self, point: Point) -> Recipe:
        """The recipe's entry with the values of a point."""
        recipe = self.settings.recipes[point.recipe]
        values = recipe.values
        values |= {part: values.get(part, {}) | keys for part, keys in point.values.items()}
        return validated(Recipe, {"recipe": recipe.recipe or point.recipe, **values})

    def run(self) -> Generator[Request, Answers, Result]:
        """Yields what has to be trained, and receives its results. Nothing is requested twice.

        UserError if a required recipe diverges at all of its values.
        """
        running = [point for points in self.points.values() for point in points]
        tried, planned = list(running), len(running)
        finals: dict[str, tuple[Scores, ...]] = {}  # entry -> by seed
        trials: list[Trial] = []
        cost = 0
        rounds, seeds = self.settings.train.rounds, len(self.seeds)
        for number, n in enumerate(range(min(2, seeds), seeds + 1), 1):
            ended: list[Trial] = []
            while running:
                known = len(finals.get(running[0].entry, ()))
                request = Request(
                    f"rung {number}", tuple(running), tuple(self.seeds[known:n]), rounds
                )
                answers = yield request
                cost += request.cost
                for point in running:
                    fresh = self.scores(point, answers, "validation")
                    earlier = finals.get(point.entry, ())
                    finals[point.entry] = both = (*earlier, *fresh) if fresh else ()
                    ended.append(Trial.from_scores(request, point, both))
                running = list(self._beyond(ended, tried))
                tried += running
            trials += sorted(ended, key=lambda trial: trial.rank)
            running = _advancing(ended)
            if lost := sorted({*self.required} - {point.recipe for point in running}):
                raise UserError(
                    f"no value of {', '.join(lost)} is left, as all that ran last diverged",
                    path=(self.kind,),
                    allowed="smaller values of train.lr",
                )
        return Result(tuple(trials), tuple(tried[planned:]), cost)

    def scores(self, point: Point, answers: Answers, split: str) -> tuple[Scores, ...]:
        """(loss, main metric) by seed; none if a training or a loss diverged.

        UserError if the metric is not defined.
        """
        finals, loss, metric = answers[point.entry], f"{split}_loss", f"{split}_{self.metric}"
        if any(loss not in final for final in finals):
            return ()
        if any(metric not in final for final in finals):
            raise UserError(
                f"{self.kind}: {metric.replace('_', ' ')} of {point.entry} is not defined",
                allowed="more samples, or others",
            )
        return tuple((final[loss], final[metric]) for final in finals)

    def _beyond(self, ended: Sequence[Trial], tried: Sequence[Point]) -> Iterator[Point]:
        """The points that extend the grids, of recipes whose best value is at an edge.

        The best point is changed in one number each time.
        """
        for recipe, ranked in _by_recipe(ended).items():
            own = [point for point in tried if point.recipe == recipe]
            best = [trial.point for trial in ranked if trial.rank[:2] == ranked[0].rank[:2]]
            axes, points = _axes(own), []
            for section, key in cells(axes):
                values = axes[section][key]
                ends = {edge(point.values[section][key], values) for point in best}
                if len(ends) == 1 and None not in ends:
                    beyond = {key: _next(values, "largest" in ends)}
                    changed = best[0].values | {section: best[0].values[section] | beyond}
                    points.append(Point.from_values(recipe, changed))
            fresh = [point for point in points if point not in own and self._is_valid(point)]
            yield from fresh[: MAX_EXTENSIONS + len(self.points[recipe]) - len(own)]

    def _is_valid(self, point: Point) -> bool:
        """Whether the recipe takes the values."""
        try:
            check.compose(self.laid_out(Request("", (point,), (0,), 1)), point.entry, self.scenario)
        except UserError:
            return False
        return True


def _ranked(trials: Iterable[Trial]) -> list[Trial]:
    """The trials that did not diverge, the best first."""
    return sorted((trial for trial in trials if trial.losses), key=lambda trial: trial.rank)


def _by_recipe(trials: Iterable[Trial]) -> dict[str, list[Trial]]:
    """Recipe -> its trials that did not diverge, the best first."""
    ranked: dict[str, list[Trial]] = {}
    for trial in _ranked(trials):
        ranked.setdefault(trial.point.recipe, []).append(trial)
    return ranked


def _advancing(ended: Sequence[Trial]) -> list[Point]:
    """The points that go on. Of each recipe: the best two, all that are not worse than the best,
    and further ones until all recipes have equally many."""
    by_recipe = _by_recipe(ended).values()
    drops = {
        trial.point.entry: number >= MIN_VALUES and trial.is_worse(own[0])
        for own in by_recipe
        for number, trial in enumerate(own)
    }
    count = max(
        (sum(not drops[trial.point.entry] for trial in own) for own in by_recipe), default=0
    )
    return [
        trial.point
        for own in by_recipe
        for trial in sorted(own, key=lambda trial: drops[trial.point.entry])[:count]
    ]


def tuning(settings: Config) -> Search:
    """The search of `noniid tune`. UserError if `tune` makes no sense.

    A recipe with a single point has nothing to choose and is left out. With `trials` it is an
    error, as is every grid of fewer points.
    """
    tune = settings.tune
    if tune is None:
        raise UserError(f"{FILE}: tune is missing: what to try; for example {EXAMPLE}")
    names, points = tune.recipes or settings.recipe_names, {}
    with together(source=FILE) as checked:
        with checked():
            scenario, models = _scenario(settings, tune.scenario, names)
        for name in names:
            grid = grid_of(settings, name, tune.grid)
            trials = tune.trials or len(grid)
            with checked("tune", "grid"):
                if len(grid) < trials:
                    raise UserError(
                        f"{name} has {len(grid)} points, {trials - len(grid)} fewer than "
                        f"tune.trials = {trials}; add values, or lower tune.trials"
                    )
                if len(grid) > 1:
                    points[name] = _drawn(grid, tune.seeds[0], trials)
        with checked("tune", "grid"):
            if not points and tune.trials is None:
                raise UserError(
                    "has one point for each recipe, so there is nothing to choose; add values"
                )
    return Search(settings, "tune", scenario, tune.seeds, points, points.keys(), models)


def choosing(settings: Config) -> Search:
    """The search of `noniid choose`; FedAvg takes part. UserError if there is nothing to choose."""
    choose = settings.choose or ChooseSettings()
    bases = [name for name in settings.recipes if settings.composition(name) == BASE]
    if not bases and BASE in settings.recipes:
        raise UserError(
            f"is {settings.composition(BASE)!r}",
            path=("recipes", BASE),
            allowed="FedAvg, with which `choose` compares the others",
        )
    recipes = ({} if bases else {BASE: Recipe()}) | settings.recipes
    settings = settings.model_copy(update={"recipes": recipes, "choose": choose})
    names = list(choose.recipes or settings.recipe_names)
    if not {*names} & {*bases}:
        names.append((*bases, BASE)[0])
    scenario, models = _scenario(settings, choose.scenario, names, compared=True)
    points = {
        name: grid_of(
            settings, name, choose.grid or {"train": {"lr": around(settings.train_of(name).lr)}}
        )
        for name in names
    }
    if sum(map(len, points.values())) < 2:
        raise UserError("there is one candidate; add recipes, or values of `grid`")
    required = [name for name in names if settings.composition(name) == BASE]
    return Search(settings, "choose", scenario, choose.seeds, points, required, models)


def around(lr: float | Rate | Mapping[str, Any]) -> list[Any]:
    """A third of a step size, it, and three times it. A schedule stays alone."""
    if isinstance(lr, Rate | Mapping):
        return [lr]
    return [float(f"{lr * factor:.2g}") for factor in (1 / 3, 1, 3)]


def _scenario(
    settings: Config, scenario: str | None, names: Sequence[str], compared: bool = False
) -> tuple[str, dict[str, str]]:
    """(the scenario of a search, recipe -> what a site gets). UserError for recipes that can't be
    judged there.

    `compared`: whether recipes are compared with each other.
    """
    name = scenario or settings.scenario_names[0]
    partition, models = settings.scenarios[name].partition, dict[str, str]()
    with together() as checked:
        with checked("data", "validation"):
            if not settings.data.validation:
                raise UserError("0 leaves no samples to choose on", allowed="above 0")
        for recipe in names:
            with checked("recipes", recipe):
                algorithm = check.compose(settings, recipe, name)
                leaks = algorithm.leak or ("it is not federated" if algorithm.needs.pooled else "")
                reason = leaks if compared else ""
                models[recipe] = model_of_site(algorithm)
                if models[recipe] != COMMON and not goes_by_owner(partition):
                    reason = (
                        "each client has a model of its own, and with partition "
                        f"{partition!r} the validation samples are no client's"
                    )
                if reason:
                    raise UserError(f"{recipe} can't be chosen: {reason}", allowed="other recipes")
    return name, models


def model_of_site(algorithm: Algorithm) -> str:
    """What a site gets, in words."""
    if (component := algorithm.own_model) is not None:
        return FINE_TUNED if component.name == "finetune" else "a model per site"
    if algorithm.own_models:
        return "a model per cluster of sites"
    parts = ", ".join(sorted(algorithm.needs.personal))
    if not parts:
        return COMMON
    return f"{'a head' if parts == HEAD else f'own parameters ({parts})'} per site"


def grid_of(settings: Config, name: str, grid: Axes) -> list[Point]:
    """The points of a recipe: the product of the values of its own sections."""
    sections = sorted(
        {*grid} & {"train", *settings.methods_of(name)}, key=lambda section: section != "train"
    )
    axes = {(part, key): grid[part][key] for part in sections for key in sorted(grid[part])}
    points = []
    for combination in itertools.product(*axes.values()):
        values: Values = {}
        for (section, key), value in zip(axes, combination, strict=True):
            values.setdefault(section, {})[key] = value
        points.append(Point.from_values(name, values))
    return points


def _drawn(grid: Sequence[Point], seed: int, trials: int) -> list[Point]:
    """Draws points without replacement.

    Each point adds the values that were drawn least, and a hash breaks ties.

    So no value is missing where another one comes twice, and more trials keep the points of fewer.
    """
    remaining = sorted(grid, key=lambda point: digest(seed, point.values))
    axes, times = _axes(grid), Counter[tuple[str, str, str]]()
    for _ in range(trials):
        fresh = min(
            remaining,
            key=lambda point: sum(times[c] * len(axes[c[0]][c[1]]) for c in _cells(point)),
        )
        times.update(_cells(fresh))
        remaining.remove(fresh)
    return [point for point in grid if point not in remaining]


def _cells(point: Point) -> list[tuple[str, str, str]]:
    """(section, key, value as text) of all its values."""
    return [(*key, repr(point.values[key[0]][key[1]])) for key in cells(point.values)]


def _axes(points: Iterable[Point]) -> Axes:
    """All values of the points, each once, numbers in ascending order."""
    axes: Axes = {}
    for point in points:
        for section, key in cells(point.values):
            values, value = axes.setdefault(section, {}), point.values[section][key]
            values[key] = sorted(
                [value, *(x for x in values.get(key, ()) if x != value)],
                key=lambda x: (numbers([x]), repr(x)),
            )
    return axes


def _next(tried: Sequence[Any], at_top: bool) -> float:
    """The next number beyond an end: the last ratio again, or the last difference if one of the
    two is not above 0."""
    *_, inner, edge = sorted(numbers(tried), reverse=not at_top)
    is_ratio = min(inner, edge) > 0
    value = float(f"{edge * edge / inner if is_ratio else 2 * edge - inner:.3g}")
    return int(value) if {type(inner), type(edge)} == {int} and value.is_integer() else value


def record(search: Search, result: Result, recipe: str, samples: int) -> Tuned:
    """How the best of a recipe's trials was chosen. `samples`: of validation."""
    order, full = result.ranked(recipe), _by_recipe(result.finals)[recipe]
    best, values = full[0], full[0].point.values
    return Tuned(
        chosen={section: dict(keys) for section, keys in values.items()},
        trials=len(order),
        extended=sum(point.recipe == recipe for point in result.extended),
        tried=result.axes(recipe),
        diverged=sum(not trial.losses for trial in order),
        scenario=search.scenario,
        seeds=list(search.seeds),
        metric=search.metric,
        loss=round(best.loss, 6),
        validation=round(best.metric, 6),
        runner_up=round(full[1].metric, 6) if len(full) > 1 else None,
        samples=samples,
        settings=fingerprint(search.settings, recipe, values, search.scenario),
    )
