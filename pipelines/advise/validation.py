"""What the advice would have been worth on scenarios that the learner has not seen: regret in
points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from fedml_noniid.pipelines.advise.base import BASELINE, Known
from fedml_noniid.pipelines.advise.learner import Expected, Learner


class Trial(NamedTuple):
    """One scenario that was left out, with what three strategies choose for it."""

    known: Known
    ranked: tuple[Expected, ...]  # the advisor's answer, also outside the range of the rest
    reason: str  # why the advisor says that it does not know; "" if it answers
    average: str  # the method with the best mean gain on the rest

    @property
    def choices(self) -> dict[str, str]:
        """Strategy -> the method that it chooses."""
        return {
            "advisor": self.ranked[0].method,
            "best on average": self.average,
            "FedAvg": BASELINE,
        }

    def regret(self, method: str) -> float:
        """Points that a method ends below the best method of this scenario, FedAvg among them."""
        gains = {BASELINE: 0.0, **self.known.gains}
        return max(gains.values()) - gains[method]

    @property
    def inside(self) -> tuple[int, int]:
        """(methods whose gain lies in the interval, all methods but FedAvg)."""
        of = [(one, self.known.gains[one.method]) for one in self.ranked if one.method != BASELINE]
        return sum(one.low <= gain <= one.high for one, gain in of), len(of)


def scenarios(known: Sequence[Known]) -> list[Trial]:
    """Each scenario, advised by all others."""
    return _left_out(known, lambda one: one.name)


def data_sets(known: Sequence[Known]) -> list[Trial]:
    """Each scenario, advised by those of all other data sets.

    Empty for a base with one data set.
    """
    return _left_out(known, lambda one: one.data)


def _left_out(known: Sequence[Known], part: Callable[[Known], str]) -> list[Trial]:
    trials = []
    for name in dict.fromkeys(map(part, known)):
        rest = [one for one in known if part(one) != name]
        if len(rest) < 2:
            continue
        learner, average = Learner(rest), best_on_average(rest)
        for one in known:
            if part(one) == name:
                ranked, reason = learner.ranked(one.measures), learner.why_not(one.measures)
                trials.append(Trial(one, ranked, reason, average))
    return trials


def best_on_average(known: Sequence[Known]) -> str:
    """The method with the best mean gain; FedAvg if no mean is above 0."""
    means = {
        method: sum(one.gains[method] for one in known) / len(known) for method in known[0].gains
    }
    return max({BASELINE: 0.0, **means}.items(), key=lambda item: item[1])[0]
