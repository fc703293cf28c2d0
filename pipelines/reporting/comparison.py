"""Paired comparisons of methods over seeds: what their differences show, after Holm's adjustment,
and what not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from scipy.special import nctdtr, stdtr, stdtrit

from fedml_noniid.pipelines.reporting.summary import (
    TINY,
    MethodSummary,
    ScenarioSummary,
    Spread,
    spread,
)

LEVEL = 0.05
MOST_SEEDS = 100  # no estimate goes beyond
FOR_TEMPLATES = ("against", "seeds_needed", "LEVEL", "MOST_SEEDS")  # what sentences call


class Comparison(NamedTuple):
    """A paired t test: final accuracy of a method minus the other's, on the seeds that both have.

    Accuracies are fractions. Without two seeds there is no test. Without `deviation` there is none
    either: the differences are equal, and one test sample is not known. `p` is 1 then.
    """

    recipe: str
    differences: tuple[float, ...]
    step: float  # one test sample; 0 if the size of the test set is not known
    # standard deviation of the differences, at least what one sample on one seed makes
    deviation: float = 0.0
    p: float | None = None
    holm_p: float | None = None  # `p` after Holm's adjustment for all comparisons of the table
    # Holm's method compares `p` with it. The interval has 0 in it unless `holm_p` is below LEVEL.
    level: float = LEVEL
    # whether both end with the same weights on all common seeds; there is no test then
    same: bool = False
    # whether both predict the same on all common seeds. The test stays, as Holm's adjustment must
    # not depend on the results of the tests.
    same_predictions: bool = False

    @property
    def mean(self) -> float:
        """Mean difference. Needs a seed in common."""
        return statistics.fmean(self.differences)

    @property
    def spread(self) -> Spread | None:
        """Mean and deviation of the differences as they are; None without a seed in common."""
        return spread(self.differences)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval of the mean at `level`: that of the test. None without a test."""
        n = len(self.differences)
        return (
            interval(Spread(self.mean, self.deviation, n), self.level) if self.deviation else None
        )

    @property
    def higher(self) -> int:
        """Seeds on which the method ends above the other."""
        return sum(d > TINY for d in self.differences)

    @property
    def gap(self) -> float:
        """Size of the mean difference."""
        return abs(self.mean)

    @property
    def is_below_a_sample(self) -> bool:
        """Whether the mean difference is at most one test sample."""
        return self.step > 0 and self.gap <= self.step + TINY

    @property
    def rejects(self) -> bool:
        """Whether the test rejects equal means, after Holm's adjustment."""
        return self.holm_p is not None and self.holm_p < LEVEL

    @property
    def verdict(self) -> str:
        """`better`, `worse`, `undecided`, `within one sample` (of the test set), `same weights`,
        `same predictions`.

        Without a test `one seed` or `no seed`.
        """
        if self.same or self.same_predictions:
            return "same weights" if self.same else "same predictions"
        if self.p is None:
            return "one seed" if self.differences else "no seed"
        within = self.interval is not None and max(map(abs, self.interval)) <= self.step + TINY
        if self.is_below_a_sample and (self.rejects or within):
            return "within one sample"
        if self.rejects:
            return "better" if self.mean > 0 else "worse"
        return "undecided"

    @property
    def mark(self) -> str:
        """What stands behind the number of a method that is not told apart from the other one."""
        if self.same or self.same_predictions:
            return " ="
        return "" if self.p is None or self.is_decided else " ≈"

    @property
    def is_decided(self) -> bool:
        """Whether it is better or worse."""
        return self.verdict in ("better", "worse")


def against(scenario: ScenarioSummary, other: MethodSummary | None) -> dict[str, Comparison]:
    """Every compared method against `other`, by recipe."""
    methods = [method for method in scenario.methods if method.compared and method is not other]
    compared = [_compared(method, other, scenario.step) for method in methods] if other else []
    return {comparison.recipe: comparison for comparison in adjusted(compared)}


def on_sites(scenario: ScenarioSummary) -> dict[str, Comparison]:
    """Every federated method without a leak against the baseline, by recipe: the mean over the
    sites of the main metric on their own test samples."""
    base, step = scenario.baseline, scenario.site_step
    if base is None or not scenario.has_site_tests:
        return {}
    methods = [method for method in scenario.methods if method.federated and not method.leak]
    compared = [
        _compared(method, base, step, "site_mean") for method in methods if method is not base
    ]
    return {comparison.recipe: comparison for comparison in adjusted(compared)}


def _compared(
    method: MethodSummary, other: MethodSummary, step: float, column: str = "final"
) -> Comparison:
    """`column`: of `MethodSummary.runs`."""
    ours, theirs = method.runs[column].dropna().to_dict(), other.runs[column].dropna().to_dict()
    common = method.weights.keys() & other.weights.keys()
    if common and all(method.weights[seed] == other.weights[seed] for seed in common):
        return Comparison(method.recipe, (0.0,) * len(common), step, same=True)
    predictions = [(method.predictions.get(seed), other.predictions.get(seed)) for seed in common]
    is_same = bool(common) and all(mine and mine == its for mine, its in predictions)
    return paired(method.recipe, ours, theirs, step)._replace(same_predictions=is_same)


def paired(
    recipe: str, ours: Mapping[int, float], theirs: Mapping[int, float], step: float
) -> Comparison:
    """The paired t test of two methods, by their numbers of each seed; `step` is one test sample.

    Equal differences would give p = 0. The test takes the smallest deviation that these seeds can
    show instead. Differences that only rounding separates are equal.
    """
    pairs = [(ours[seed], theirs[seed]) for seed in sorted(ours.keys() & theirs.keys())]
    differences = tuple(x - y for x, y in pairs)
    n = len(differences)
    if n < 2:
        return Comparison(recipe, differences, step)
    mean, std = statistics.fmean(differences), statistics.stdev(differences)
    rounding = TINY * max(abs(number) for pair in pairs for number in pair)
    deviation = max(std if std > rounding else 0.0, step / math.sqrt(n))
    p = 2 * stdtr(n - 1, -abs(mean) * math.sqrt(n) / deviation) if deviation else 1.0
    return Comparison(recipe, differences, step, deviation, float(p))


def interval(spread_: Spread | None, level: float = LEVEL) -> tuple[float, float] | None:
    """The ends of a mean's interval by the t distribution: 95 %, or 1 - `level`.

    None without two seeds.
    """
    if spread_ is None or spread_.std is None:
        return None
    half = per_deviation(spread_.n, level) * spread_.std
    return spread_.mean - half, spread_.mean + half


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: the smallest times their number, the next times one less, ...,
    never descending."""
    raised, highest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        highest = max(highest, min(1.0, (len(ps) - rank) * ps[i]))
        raised[i] = highest
    return raised


def adjusted(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The comparisons with Holm's adjustment for all of them that have a test.

    Holm's method ends at the first p that does not reject. All that follow have its level.
    """
    ps = sorted(comparison.p for comparison in comparisons if comparison.p is not None)
    holm_ps = holm(ps)
    n_rejected = sum(p < LEVEL for p in holm_ps)

    def of_rank(comparison: Comparison) -> Comparison:
        if comparison.p is None:
            return comparison
        rank = ps.index(comparison.p)
        level = LEVEL / (len(ps) - min(rank, n_rejected))
        return comparison._replace(holm_p=holm_ps[rank], level=level)

    return [of_rank(comparison) for comparison in comparisons]


def per_deviation(n: int, level: float = LEVEL) -> float:
    """The mean difference that a paired t test over n seeds needs, in standard deviations of the
    differences."""
    return float(stdtrit(n - 1, 1 - level / 2)) / math.sqrt(n)


def seeds_needed(comparison: Comparison, comparisons: int) -> int | None:
    """The fewest seeds that would decide it among so many comparisons, if mean and deviation stay.

    None: too many.
    """
    level = LEVEL / comparisons
    enough = (
        n
        for n in range(2, MOST_SEEDS + 1)
        if per_deviation(n, level) * comparison.deviation < abs(comparison.mean)
    )
    return next(enough, None)


def power(mean: float, deviation: float, n: int, level: float) -> float:
    """The probability that the two-sided t test over n seeds at this level rejects, and on the side
    above 0, if mean and deviation of the differences are the true ones."""
    if not deviation:
        return 0.0
    root = math.sqrt(n)
    return float(1 - nctdtr(n - 1, mean / deviation * root, per_deviation(n, level) * root))


def evidence(comparison: Comparison, decimals: int = 2, unit: str = "", over: str = "seeds") -> str:
    """A mean difference with its interval: `+2.00, 95 % interval -1.00 to +5.00 over 3 seeds:
    undecided`."""
    mean, n = f"{comparison.mean:+z.{decimals}f}{unit}", len(comparison.differences)
    if n < 2:
        return f"{mean} on one seed: no evidence either way"
    if comparison.interval is None:
        return f"{mean} on each of {n} {over}"
    low, high = comparison.interval
    undecided = ": undecided" if low <= 0 <= high else ""
    return (
        f"{mean}, 95 % interval {low:+z.{decimals}f} to {high:+z.{decimals}f} over {n} "
        f"{over}{undecided}"
    )


def confirmed(comparisons: Sequence[Comparison]) -> tuple[int, int]:
    """How many differences are above 0 and below 0, after Holm's adjustment for all of them."""
    means = [comparison.mean for comparison in adjusted(comparisons) if comparison.rejects]
    return sum(mean > 0 for mean in means), sum(mean < 0 for mean in means)
