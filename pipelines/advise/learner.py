"""From the measures of a scenario to each method's expected gain over FedAvg.

The expected gain is the mean gain on the scenarios of the base, weighted by how like they are: a
kernel regression (Nadaraya 1964, Watson 1964) on the standardised measures. Its width is not tuned:
it is the base's mean distance from a scenario to the nearest other one. The interval is that of the
jackknife (Barber et al., Predictive inference with the jackknife+, Annals of Statistics 2021, its
equation for the jackknife): the residuals of leaving out one scenario at a time. Outside the range
of the base the answer is that it does not know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from fedml_noniid.pipelines.advise import measures as measures_of
from fedml_noniid.pipelines.advise.base import BASELINE, Known
from fedml_noniid.pipelines.advise.measures import MEASURES, Measures
from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.types import Floats

LEVEL = 0.9  # of the intervals
LEAST = math.ceil(LEVEL / (1 - LEVEL) - 1e-9)  # scenarios: fewer residuals have no such quantile
BEYOND = 0.1  # by this part of its range in the base, a measure may lie outside it


class Expected(NamedTuple):
    """A method's expected gain over FedAvg and its interval, in points of final test accuracy."""

    method: str
    gain: float
    low: float
    high: float


class Advice(NamedTuple):
    """The methods, best expected gain first, or the reason why it does not know.

    FedAvg is among them, with gain 0.
    """

    ranked: tuple[Expected, ...]
    nearest: str  # the scenario of the base that is most like this one
    reason: str = ""

    @property
    def best(self) -> Expected | None:
        """The advised method. None if it does not know."""
        return self.ranked[0] if self.ranked else None


@dataclass(frozen=True)
class Learner:
    """The scenarios of the base, standardised."""

    known: Sequence[Known]

    def __post_init__(self) -> None:
        if len(self.known) < 2:
            raise UserError(
                f"the base of `noniid advise` has {len(self.known)} scenarios; allowed: 2 or more"
            )

    @cached_property
    def methods(self) -> tuple[str, ...]:
        """The methods of the base without FedAvg."""
        return tuple(method for method in self.known[0].gains if method != BASELINE)

    @cached_property
    def gains(self) -> Floats:
        """[scenarios, methods], in points."""
        return np.array([[one.gains[method] for method in self.methods] for one in self.known])

    @cached_property
    def _points(self) -> Floats:
        return np.stack([_point(one.measures) for one in self.known])

    @cached_property
    def _scale(self) -> Floats:
        deviation = self._points.std(0)
        return np.where(deviation > 0, deviation, 1.0)

    @cached_property
    def _apart(self) -> Floats:
        """The distance from each scenario to the nearest other one."""
        every = np.stack([self._distances(one.measures) for one in self.known])
        np.fill_diagonal(every, np.inf)
        return np.asarray(every.min(1))

    def _distances(self, measures: Measures) -> Floats:
        """To each scenario, in standard deviations of the measures."""
        return np.asarray(np.sqrt((((_point(measures) - self._points) / self._scale) ** 2).sum(1)))

    def predicted(self, measures: Measures) -> Floats:
        """The expected gain of each method, whether or not the base covers these measures."""
        squares, width = self._distances(measures) ** 2, float(self._apart.mean())
        weights = (
            np.exp((squares.min() - squares) / (2 * width**2))
            if width
            else (squares == squares.min()) * 1.0
        )
        return np.asarray(weights @ self.gains / weights.sum())

    @cached_property
    def halves(self) -> Floats:
        """Half the width of each method's interval, infinite with fewer than LEAST scenarios.

        It is the k-th smallest absolute residual of n, k = ceil(LEVEL (n + 1)).
        """
        n = len(self.known)
        if n < max(LEAST, 3):
            return np.full(len(self.methods), np.inf)
        rest = [Learner([*self.known[:i], *self.known[i + 1 :]]) for i in range(n)]
        expected = np.stack(
            [learner.predicted(one.measures) for learner, one in zip(rest, self.known, strict=True)]
        )
        k = math.ceil(LEVEL * (n + 1) - 1e-9)
        return np.asarray(np.sort(np.abs(self.gains - expected), axis=0)[k - 1])

    def why_not(self, measures: Measures) -> str:
        """Why the base does not cover these measures; "" if it does."""
        outside = []
        for name, measure in MEASURES.items():
            values = [one.measures[name] for one in self.known]
            low, high = min(values), max(values)
            ends = (math.log(low), math.log(high)) if measure.is_size else (low, high)
            value = math.log(measures[name]) if measure.is_size else measures[name]
            slack = BEYOND * (ends[1] - ends[0]) + 1e-9
            if not ends[0] - slack <= value <= ends[1] + slack:
                held = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
                outside.append(f"{measure.title} {measures[name]:.3g}, the base has {held}")
        if outside:
            return "; ".join(outside)
        nearest, furthest = float(self._distances(measures).min()), float(self._apart.max())
        if nearest > furthest * (1 + BEYOND):
            return (
                "no scenario of the base has such a mix of measures: the nearest is "
                f"{nearest:.1f} standard deviations "
                f"away, those of the base at most {furthest:.1f} from each other"
            )
        return ""

    def advise(self, measures: Measures) -> Advice:
        """The ranked methods for a scenario with these measures, or why it does not know."""
        lacking = measures_of.missing(measures)
        if lacking:
            return Advice((), "", f"not measured here: {', '.join(lacking)}")
        nearest = self.known[int(self._distances(measures).argmin())].name
        reason = self.why_not(measures)
        return Advice((), nearest, reason) if reason else Advice(self.ranked(measures), nearest)

    def ranked(self, measures: Measures) -> tuple[Expected, ...]:
        """All methods, best expected gain first, also outside the range of the base."""
        gains, halves = self.predicted(measures).tolist(), self.halves.tolist()
        found = [
            Expected(m, g, g - h, g + h)
            for m, g, h in zip(self.methods, gains, halves, strict=True)
        ]
        return tuple(sorted([Expected(BASELINE, 0.0, 0.0, 0.0), *found], key=lambda one: -one.gain))


def _point(measures: Measures) -> Floats:
    values = ((measures[name], measure.is_size) for name, measure in MEASURES.items())
    return np.array([math.log(value) if is_size else value for value, is_size in values])
