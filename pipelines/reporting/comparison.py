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
    """Final accuracy of a method minus the other's, on the seeds that both have.

    Accuracies are fractions.

    `low` and `high` are the ends of the 95 % interval of the paired t test. Without two seeds there
    is no test.
    """

    recipe: str
    differences: tuple[float, ...]
    step: float  # one test sample; 0 if the size of the test set is not known
    # standard deviation of the differences, at least what one sample on one seed makes
    deviation: float = 0.0
    low: float | None = None
    high: float | None = None
    p: float | None = None  # paired t test
    holm_p: float | None = None  # `p` after Holm's adjustment for all comparisons of the table
    # whether both end with the same weights on all common seeds; there is no test then
    same: bool = False

    @property
    def mean(self) -> float:
        """Mean difference. Needs a seed in common."""
        return statistics.fmean(self.differences)

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
        return self.gap <= self.step + TINY

    @property
    def verdict(self) -> str:
        """`better`, `worse`, `undecided`, `within one sample` (of the test set), `same weights`.

        Without a test `one seed` or `no seed`.
        """
        if self.same:
            return "same weights"
        if self.low is None or self.high is None:
            return "one seed" if self.differences else "no seed"
        decided = self.holm_p is not None and self.holm_p < LEVEL
        if self.is_below_a_sample and (decided or max(-self.low, self.high) <= self.step + TINY):
            return "within one sample"
        if decided:
            return "better" if self.mean > 0 else "worse"
        return "undecided"

    @property
    def is_decided(self) -> bool:
        """Whether it is better or worse."""
        return self.verdict in ("better", "worse")


def against(scenario: ScenarioSummary, other: MethodSummary | None) -> dict[str, Comparison]:
    """Every compared method against `other`, by recipe."""
    methods = [one for one in scenario.methods if one.compared and one is not other]
    found = [_compared(one, other, scenario.step) for one in methods] if other else []
    tested = [one.p for one in found if one.p is not None]
    adjusted = iter(holm(tested))
    return {
        one.recipe: one if one.p is None else one._replace(holm_p=next(adjusted)) for one in found
    }


def _compared(one: MethodSummary, other: MethodSummary, step: float) -> Comparison:
    ours, theirs = one.runs["final"].to_dict(), other.runs["final"].to_dict()
    found = paired(one.recipe, ours, theirs, step)
    common = one.weights.keys() & other.weights.keys()
    same = bool(common) and all(one.weights[seed] == other.weights[seed] for seed in common)
    return found._replace(p=None, same=True) if same else found


def paired(
    recipe: str, ours: Mapping[int, float], theirs: Mapping[int, float], step: float
) -> Comparison:
    """Compares final accuracies by seed; `step` is one test sample."""
    differences = tuple(ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys()))
    n = len(differences)
    if n < 2:
        return Comparison(recipe, differences, step)
    found = spread(differences)
    ends = interval(found)
    assert found is not None and found.std is not None and ends is not None, (
        "two values have a deviation"
    )
    # Equal differences would give p = 0. The test takes the smallest deviation that these seeds can
    # show instead.
    deviation = max(found.std if found.std > TINY else 0.0, step / math.sqrt(n))
    p = p_value(found._replace(std=deviation))
    return Comparison(recipe, differences, step, deviation, *ends, p)


def interval(difference: Spread | None) -> tuple[float, float] | None:
    """The ends of the 95 % interval of the paired t test, from differences by seed.

    None without two seeds.
    """
    if difference is None or difference.std is None:
        return None
    half = per_deviation(difference.n) * difference.std if difference.std > TINY else 0.0
    return difference.mean - half, difference.mean + half


def p_value(difference: Spread) -> float:
    """p of the paired t test, from differences by seed. 1 if they do not vary or there is one."""
    if not difference.std:
        return 1.0
    return float(
        2
        * stdtr(difference.n - 1, -abs(difference.mean) * math.sqrt(difference.n) / difference.std)
    )


def holm(ps: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: the smallest times their number, the next times one less, ...,
    never descending."""
    adjusted, highest = [0.0] * len(ps), 0.0
    for place, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        highest = max(highest, min(1.0, (len(ps) - place) * ps[i]))
        adjusted[i] = highest
    return adjusted


def per_deviation(n: int, level: float = LEVEL) -> float:
    """The mean difference that a paired t test over n seeds needs, in standard deviations of the
    differences."""
    return float(stdtrit(n - 1, 1 - level / 2)) / math.sqrt(n)


def seeds_needed(one: Comparison, comparisons: int) -> int | None:
    """The fewest seeds that would decide it among so many comparisons, if mean and deviation stay.

    None: too many.
    """
    level = LEVEL / comparisons
    enough = (
        n
        for n in range(2, MOST_SEEDS + 1)
        if per_deviation(n, level) * one.deviation < abs(one.mean)
    )
    return next(enough, None)


def power(mean: float, deviation: float, n: int, level: float) -> float:
    """The probability that the two-sided t test over n seeds at this level rejects, and on the side
    above 0, if mean and deviation of the differences are the true ones."""
    if not deviation:
        return 0.0
    root = math.sqrt(n)
    return float(1 - nctdtr(n - 1, mean / deviation * root, per_deviation(n, level) * root))


def evidence(difference: Spread, decimals: int = 2, unit: str = "") -> str:
    """A mean difference with its 95 % interval: `+2.00, 95 % interval -1.00 to +5.00 over 3 seeds:
    undecided`."""
    mean, ends = f"{difference.mean:+z.{decimals}f}{unit}", interval(difference)
    if ends is None:
        return f"{mean} on one seed: no evidence either way"
    low, high = ends
    if low == high:
        return f"{mean} on each of {difference.n} seeds"
    undecided = ": undecided" if low <= 0 <= high else ""
    return (
        f"{mean}, 95 % interval {low:+.{decimals}f} to {high:+.{decimals}f} over "
        f"{difference.n} seeds{undecided}"
    )


def confirmed(differences: Sequence[Spread]) -> tuple[int, int]:
    """How many differences are above 0 and below 0 by the paired t test, after Holm's adjustment
    for all of them."""
    adjusted = holm([p_value(difference) for difference in differences])
    means = [one.mean for one, p in zip(differences, adjusted, strict=True) if p < LEVEL]
    return sum(mean > 0 for mean in means), sum(mean < 0 for mean in means)
