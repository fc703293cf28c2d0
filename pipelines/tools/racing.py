"""The race of `noniid choose`: which recipe to take on one's own data, and by how much.

Recipes x a few values run in heats on the validation split: successive halving over rounds and
seeds (Jamieson, Talwalkar: Non-stochastic Best Arm Identification and Hyperparameter Optimization,
AISTATS 2016, https://arxiv.org/abs/1502.07943). All that run in a heat have the same seeds, so the
same partitions, cohorts and first weights: to rank their means is to rank their paired differences.
The best
values of FedAvg and of the best other recipes never drop out, so the final has its finalists.

The best recipes then meet FedAvg in a final: on fresh seeds, once, on the test split, of which the
heats use nothing. The intervals of the final hold together at 95 % (Bonferroni), so it is covered
to take the best of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from fedml_noniid.pipelines.experiment import check, tuning
from fedml_noniid.pipelines.experiment.config import ChooseSettings, Config, Recipe
from fedml_noniid.pipelines.experiment.tuning import Point
from fedml_noniid.pipelines.reporting.comparison import LEVEL, paired, per_deviation, seeds_needed
from fedml_noniid.pipelines.reporting.text import plain
from fedml_noniid.plugins.core.errors import UserError, together
from fedml_noniid.plugins.metrics import metric_of
from fedml_noniid.plugins.rates import Rate

BASE = "fedavg"
# What `nd.choose` races if nothing else is named: methods that need no public data and hold back
# nothing of a model, one or two for each kind of remedy.
RECIPES = ("fedavg", "fedprox", "scaffold", "fednova", "fedavgm", "fedadam", "feddyn", "fedlc")
VALIDATION, TEST = "validation", "test"
Accuracies = Mapping[str, Sequence[float]]  # entry -> by seed; empty if one diverged


class Heat(NamedTuple):
    """What has to be trained next, and where it is measured."""

    points: tuple[Point, ...]
    seeds: tuple[int, ...]
    rounds: int
    split: str  # VALIDATION or TEST
    metric: str  # the main one
    name: str  # `heat 1`, `final`

    @property
    def column(self) -> str:
        """Of rounds.csv."""
        return f"{self.split}_{self.metric}"

    @property
    def cost(self) -> int:
        """Rounds of training."""
        return len(self.points) * len(self.seeds) * self.rounds

    def laid_out(self, settings: Config) -> Config:
        """The experiment that trains it."""
        scenario, of = scenario_of(settings), with_base(settings)
        return tuning.laid_out(of, self.points, "choose", scenario, self.seeds, self.rounds)


class Ran(NamedTuple):
    """One line of the heats' table."""

    heat: str
    rounds: int
    seeds: int
    point: Point
    accuracy: float | None  # mean over seeds, a fraction; None if it diverged
    goes_on: bool


class Final(NamedTuple):
    """A recipe in the final. `low` and `high`: of the difference to FedAvg, all intervals together
    at 95 %."""

    point: Point
    accuracies: tuple[float, ...]  # on the test split, by fresh seed
    difference: float = 0.0
    low: float = 0.0
    high: float = 0.0
    enough: int | None = None  # seeds that would decide, if mean and deviation stay


class Decision(NamedTuple):
    """The outcome of a race."""

    taken: Point
    base: Final  # FedAvg at its best values
    finals: tuple[Final, ...]  # the others, the best on the validation split first
    diverged: tuple[Point, ...]  # in the final
    heats: tuple[Ran, ...]
    rounds: int  # of training, final included
    exhaustive: int  # the same if every point had trained all rounds on all seeds of the heats
    metric: str  # the main one, of which accuracies are

    @property
    def sentence(self) -> str:
        """What to take, and how sure that is."""
        base, n, of = _named(self.base.point), len(self.base.accuracies), metric_of(self.metric)
        unit = "points" if of.percent else of.words
        over = f"95 % interval over {n} fresh seeds"
        if len(self.finals) > 1:
            over += f", for {len(self.finals)} comparisons together"
        if not self.finals:
            return f"Take {base}: nothing else was left to compare it with."
        won = [final for final in self.finals if final.point == self.taken]
        if won:
            gain = f"{of.number(won[0].low)} to {of.number(won[0].high)} {unit}"
            return f"Take {_named(self.taken)}: {gain} over {base} ({over})."
        most = max(final.high for final in self.finals)
        if most < 0:
            return f"Take {base}: it is better than the others ({over})."
        ahead = max(self.finals, key=lambda final: final.difference)
        words = f"Take {base}: no other is more than {of.number(most)} {unit} better ({over})."
        if ahead.difference <= 0 or not ahead.enough:
            return words
        return (
            f"{words} {_named(ahead.point)} is ahead by {of.number(ahead.difference)} {unit} on "
            f"average; about {ahead.enough} fresh seeds would decide."
        )

    @property
    def text(self) -> str:
        """The final's table, the cost and the sentence."""
        of = metric_of(self.metric)
        rows = [["", f"validation{of.unit}", f"test{of.unit}", f"against {BASE}, 95 % interval"]]
        checked = {ran.point.entry: ran.accuracy for ran in self.heats}  # of the last heat
        for final in (self.base, *self.finals):
            ends = f"{of.number(final.low, '+')} to {of.number(final.high, '+')}"
            rows.append(
                [
                    _named(final.point),
                    of.number(checked[final.point.entry] or 0),
                    of.number(statistics.fmean(final.accuracies)),
                    "" if final is self.base else f"{of.number(final.difference, '+')} ({ends})",
                ]
            )
        lines = [plain(rows)]
        lines += [f"{_named(point)} diverged on fresh seeds." for point in self.diverged]
        return "\n".join([*lines, self.cost, *self.edges, self.sentence])

    @property
    def edges(self) -> list[str]:
        """A line for each value of the final that is the largest or smallest of those tried."""
        found = []
        for final in (self.base, *self.finals):
            same = [ran.point for ran in self.heats if ran.point.recipe == final.point.recipe]
            for section, keys in final.point.values.items():
                for key, value in keys.items():
                    tried = {point.values[section][key] for point in same if _is_number(value)}
                    if len(tried) > 1 and value in (min(tried), max(tried)):
                        end = "smallest" if value == min(tried) else "largest"
                        words = tuning.in_words({section: {key: value}})
                        found.append(
                            f"{final.point.recipe}: {words} is the {end} that was tried; a wider "
                            "`grid` may find better ones."
                        )
        return found

    @property
    def cost(self) -> str:
        """What the race trained."""
        share = 100 * self.rounds / self.exhaustive
        return (
            f"{self.rounds} rounds trained, {share:.0f} % of the {self.exhaustive} that all "
            "candidates on all seeds would take."
        )


def race(settings: Config, test_samples: int) -> Generator[Heat, Accuracies, Decision]:
    """Yields what has to be trained, and receives the accuracies.

    `test_samples`: of the test split. UserError if there is nothing to choose, or all diverge.
    """
    wanted, points, names = of(settings), tried(settings), with_base(settings)
    metric = settings.train.built_loss.metric
    running, all_rounds = points, settings.train.rounds
    # A drift of labels needs its rounds.
    least = 1 if names.scenarios[scenario_of(settings)].drift is None else all_rounds
    ran: list[Ran] = []
    cost = 0
    for number in range(1, len(wanted.seeds) + 1):
        rounds = max(least, math.ceil(all_rounds / 2 ** (len(wanted.seeds) - number)))
        seeds = tuple(wanted.seeds[:number])
        heat = Heat(tuple(running), seeds, rounds, VALIDATION, metric, f"heat {number}")
        found = yield heat
        cost += heat.cost
        means = {entry: statistics.fmean(values) for entry, values in found.items() if values}
        ended = [point for point in running if point.entry in means]
        order = sorted(ended, key=lambda point: -means[point.entry])
        _refuse_diverged(names, order)
        last = number == len(wanted.seeds)
        left = _best_of_each(order, names, wanted) if last else _left(order, names, wanted)
        ran += [
            Ran(heat.name, rounds, number, point, means.get(point.entry), point in left)
            for point in [*order, *(point for point in running if point not in ended)]
        ]
        running = left
    final = Heat(tuple(running), tuple(wanted.fresh), all_rounds, TEST, metric, "final")
    found = yield final
    every = len(points) * len(wanted.seeds) * all_rounds + final.cost
    base, finals, diverged = _compared(running, found, _step(metric, test_samples))
    best = max(finals, key=lambda one: one.low, default=base)
    taken = best.point if best.low > 0 else base.point
    costs = cost + final.cost, every
    return Decision(taken, base, finals, diverged, tuple(ran), *costs, metric)


def of(settings: Config) -> ChooseSettings:
    """The section `choose`, or its defaults."""
    return settings.choose or ChooseSettings()


def scenario_of(settings: Config) -> str:
    """The scenario on whose partitions the race runs."""
    return of(settings).scenario or settings.scenario_names[0]


def with_base(settings: Config) -> Config:
    """The settings with an entry that is FedAvg alone."""
    if any(map(_is_base(settings), settings.recipes)):
        return settings
    if BASE in settings.recipes:
        raise UserError(
            f"is {settings.composition(BASE)!r}",
            where=("recipes", BASE),
            allowed="FedAvg, with which `choose` compares the others",
        )
    return settings.model_copy(update={"recipes": settings.recipes | {BASE: Recipe()}})


def tried(settings: Config) -> list[Point]:
    """The points of all recipes, FedAvg's first. UserError if there is nothing to choose."""
    wanted, named = of(settings), with_base(settings)
    if not settings.data.validation:
        where, words = ("data", "validation"), "0 leaves no samples to choose on"
        raise UserError(words, where=where, allowed="above 0")
    is_base = _is_base(named)
    names = list(wanted.recipes or settings.recipe_names)
    if not any(map(is_base, names)):
        names.append(next(filter(is_base, named.recipes)))
    names.sort(key=lambda name: not is_base(name))
    _refuse_unfit(named, names)
    points = []
    for name in names:
        grid = wanted.grid or {"train": {"lr": around(named.train_of(name).lr)}}
        points += tuning.grid_of(named, name, grid)[1]
    if len(points) < 2:
        raise UserError("there is one candidate; add recipes, or values of `grid`")
    return points


def around(lr: float | Rate | Mapping[str, Any]) -> list[Any]:
    """A third of a step size, it, and three times it. A schedule stays alone."""
    if isinstance(lr, Rate | Mapping):
        return [lr]
    return [float(f"{lr * factor:.2g}") for factor in (1 / 3, 1, 3)]


def _is_base(settings: Config) -> Callable[[str], bool]:
    """Whether an entry is FedAvg alone."""
    return lambda name: settings.composition(name) == BASE


def _refuse_unfit(settings: Config, names: Sequence[str]) -> None:
    """UserError for recipes that the race can't judge."""
    with together() as checked:
        for name in names:
            with checked("recipes", name):
                algorithm = check.compose(settings, name, scenario_of(settings))
                reason = ""
                if algorithm.needs.personal or algorithm.own_model is not None:
                    reason = (
                        "each client has a model of its own, and the validation samples are no "
                        "client's"
                    )
                elif algorithm.leak:
                    reason = algorithm.leak
                elif algorithm.needs.pooled:
                    reason = "it is not federated"
                if reason:
                    raise UserError(f"{name} can't be chosen: {reason}", allowed="other recipes")


def _left(order: Sequence[Point], settings: Config, wanted: ChooseSettings) -> list[Point]:
    """The points that go on, the best first: one in `eta`, and what the final would have."""
    top = order[: math.ceil(len(order) / wanted.eta)]
    final = _best_of_each(order, settings, wanted)
    return [point for point in order if point in top or point in final]


def _best_of_each(order: Sequence[Point], settings: Config, wanted: ChooseSettings) -> list[Point]:
    """The best point of FedAvg, and those of the best other recipes."""
    is_base = _is_base(settings)
    best: dict[str, Point] = {}
    for point in order:
        best.setdefault(BASE if is_base(point.recipe) else point.recipe, point)
    base = best.pop(BASE)
    return [base, *list(best.values())[: wanted.finalists]]


def _refuse_diverged(settings: Config, order: Sequence[Point]) -> None:
    if not any(_is_base(settings)(point.recipe) for point in order):
        raise UserError(
            "choose: FedAvg diverged at all of its values; add smaller values of train.lr"
        )


def _step(metric: str, test_samples: int) -> float:
    """The least difference between two accuracies on the test split: a sample."""
    return 1 / test_samples if metric == "accuracy" else 0.0


def _compared(
    running: Sequence[Point], found: Accuracies, step: float
) -> tuple[Final, tuple[Final, ...], tuple[Point, ...]]:
    """(FedAvg, the others, those that diverged)."""
    base, *others = running
    theirs = dict(enumerate(found[base.entry]))
    if not theirs:
        raise UserError(
            f"choose: {_named(base)} diverged on fresh seeds; add smaller values of train.lr"
        )
    ended = [point for point in others if found[point.entry]]
    finals = []
    for point in ended:
        ours = dict(enumerate(found[point.entry]))
        one = paired(point.recipe, ours, theirs, step)
        half = per_deviation(len(theirs), LEVEL / len(ended)) * one.deviation
        ends = one.mean - half, one.mean + half
        enough = seeds_needed(one, len(ended))
        finals.append(Final(point, tuple(ours.values()), one.mean, *ends, enough))
    gone = tuple(point for point in others if not found[point.entry])
    return Final(base, tuple(theirs.values())), tuple(finals), gone


def frame_of_heats(decision: Decision) -> pd.DataFrame:
    """A line for each point of each heat; of the validation split, unscaled."""
    lines = [
        {
            "heat": ran.heat,
            "rounds": ran.rounds,
            "seeds": ran.seeds,
            "recipe": ran.point.recipe,
            "values": ran.point.words,
            f"validation_{decision.metric}": ran.accuracy,
            "goes_on": ran.goes_on,
        }
        for ran in decision.heats
    ]
    return pd.DataFrame(lines)


def frame_of_final(decision: Decision) -> pd.DataFrame:
    """A line for each recipe of the final, FedAvg first; of the test split, unscaled."""
    lines = [
        {
            "recipe": final.point.recipe,
            "values": final.point.words,
            f"test_{decision.metric}": statistics.fmean(final.accuracies),
            "seeds": len(final.accuracies),
            "difference": None if final is decision.base else final.difference,
            "low": None if final is decision.base else final.low,
            "high": None if final is decision.base else final.high,
            "taken": final.point == decision.taken,
        }
        for final in (decision.base, *decision.finals)
    ]
    return pd.DataFrame(lines)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _named(point: Point) -> str:
    return f"{point.recipe} ({point.words})"
