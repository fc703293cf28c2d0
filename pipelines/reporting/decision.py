"""Decides which recipe to take on one's own data, and by how much: the answer of `noniid choose`.

The search finds the best values of each recipe on the validation split. The best recipes then meet
FedAvg at its best values: on fresh seeds, once, on the test split, of which the search uses
nothing. The intervals of this final hold together at 95 % (Bonferroni), so it is covered to take
the best finalist.
"""

from __future__ import annotations

import statistics
from collections.abc import Generator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from fedml_noniid.core.errors import UserError
from fedml_noniid.metrics import metric_of
from fedml_noniid.pipelines.experiment.config import ChooseSettings
from fedml_noniid.pipelines.experiment.search import (
    BASE,
    Answers,
    Point,
    Request,
    Result,
    Search,
    Trial,
)
from fedml_noniid.pipelines.reporting.comparison import LEVEL, paired, per_deviation, seeds_needed
from fedml_noniid.pipelines.reporting.text import plain

# What `nd.choose` compares if nothing else is named: methods that need no public data and hold back
# nothing of a model, one or two for each kind of remedy.
RECIPES = ("fedavg", "fedprox", "scaffold", "fednova", "fedavgm", "fedadam", "feddyn", "fedlc")


class Finalist(NamedTuple):
    """A recipe in the final. `low` and `high`: of the difference to FedAvg, all intervals together
    at 95 %; all 0 for FedAvg itself."""

    trial: Trial  # of the search: all rounds on all seeds
    tested: tuple[float, ...]  # the main metric on the test split, by fresh seed
    difference: float = 0.0
    low: float = 0.0
    high: float = 0.0
    enough: int | None = None  # seeds that would decide, if mean and deviation stay


class Decision(NamedTuple):
    """The outcome of search and final."""

    base: Finalist  # FedAvg at its best values
    finalists: tuple[Finalist, ...]  # the others, the best on the validation split first
    diverged: tuple[Point, ...]  # in the final
    result: Result
    rounds: int  # of training, final included
    exhaustive: int  # the same if every point had trained all rounds on all seeds of the search
    metric: str  # the main one
    samples: int  # of the validation split
    # Recipe -> what a site gets; empty unless all were judged on the sites' own samples.
    models: Mapping[str, str] = MappingProxyType({})

    @property
    def taken(self) -> Point:
        """The finalist with the highest lower end, if it is above 0; or else FedAvg."""
        best = max(self.finalists, key=lambda finalist: finalist.low, default=self.base)
        return best.trial.point if best.low > 0 else self.base.trial.point

    @property
    def sentence(self) -> str:
        """What to take, how sure that is, and what a site then has."""
        if not self.models:
            return self._comparison
        model = self.models[self.taken.recipe]
        return f"{self._comparison} That is {model}. All were judged on the sites' own samples."

    @property
    def _comparison(self) -> str:
        base, metric = self.base.trial.point.name, metric_of(self.metric)
        unit = "points" if metric.percent else metric.label
        over = f"95 % interval over {len(self.base.tested)} fresh seeds"
        if len(self.finalists) > 1:
            over += f", for {len(self.finalists)} comparisons together"
        if not self.finalists:
            return f"Take {base}: nothing else was left to compare it with."
        for finalist in self.finalists:
            if finalist.trial.point == self.taken:
                gain = f"{metric.number(finalist.low)} to {metric.number(finalist.high)} {unit}"
                return f"Take {finalist.trial.point.name}: {gain} over {base} ({over})."
        most = max(finalist.high for finalist in self.finalists)
        if most < 0:
            others = " and ".join(finalist.trial.point.name for finalist in self.finalists)
            return f"Take {base}: it is better than {others} ({over})."
        ahead = max(self.finalists, key=lambda finalist: finalist.difference)
        sentence = (
            f"Take {base}: no other of the final is more than {metric.number(most)} {unit} better "
            f"({over})."
        )
        if ahead.difference > 0 and ahead.enough:
            sentence += (
                f" {ahead.trial.point.name} is ahead by {metric.number(ahead.difference)} {unit} "
                f"on average; about {ahead.enough} fresh seeds would decide."
            )
        return sentence

    @property
    def text(self) -> str:
        """The final's table, the cost, what to know of the search, and the sentence."""
        metric = metric_of(self.metric)
        header = "validation loss", f"validation{metric.unit}", f"test{metric.unit}"
        rows = [["", *header, f"against {BASE}, 95 % interval"]]
        for finalist in (self.base, *self.finalists):
            against = (
                metric.number(x, "+") for x in (finalist.difference, finalist.low, finalist.high)
            )
            rows.append(
                [
                    finalist.trial.point.name,
                    f"{finalist.trial.loss:.4f}",
                    metric.number(finalist.trial.metric),
                    metric.number(statistics.fmean(finalist.tested)),
                    "" if finalist is self.base else "{} ({} to {})".format(*against),
                ]
            )
        final = [finalist.trial.point.recipe for finalist in (self.base, *self.finalists)]
        others = sorted({trial.point.recipe for trial in self.result.trials} - {*final})
        alive = {trial.point.recipe for trial in self.result.finals}
        others = [name if name in alive else f"{name} (diverged)" for name in others]
        lines = [
            plain(rows),
            *(f"{point.name} diverged on fresh seeds." for point in self.diverged),
            f"{self.rounds} rounds trained, {100 * self.rounds / self.exhaustive:.0f} % of the "
            f"{self.exhaustive} that all candidates on all seeds would take.",
            f"Not compared: {', '.join(others)}." if others else "",
            *self.result.notes(final, self.metric, self.samples),
            self.sentence,
        ]
        return "\n".join(filter(None, lines))

    @property
    def table(self) -> list[dict[str, Any]]:
        """A line for each recipe of the final, FedAvg first; of the test split, not scaled."""
        return [
            {
                "recipe": finalist.trial.point.recipe,
                "values": finalist.trial.point.description,
                f"test_{self.metric}": statistics.fmean(finalist.tested),
                "seeds": len(finalist.tested),
                "difference": None if finalist is self.base else finalist.difference,
                "low": None if finalist is self.base else finalist.low,
                "high": None if finalist is self.base else finalist.high,
                "taken": finalist.trial.point == self.taken,
            }
            for finalist in (self.base, *self.finalists)
        ]


def decide(
    search: Search, samples: int, test_samples: int
) -> Generator[Request, Answers, Decision]:
    """Yields what has to be trained, and receives its results.

    `samples`: of the validation split. UserError if FedAvg diverges.
    """
    choose, rounds = search.settings.choose or ChooseSettings(), search.settings.train.rounds
    result = yield from search.run()
    best, bases = dict[str, Trial](), dict.fromkeys(search.required, BASE)
    for trial in result.finals:
        best.setdefault(bases.get(trial.point.recipe, trial.point.recipe), trial)
    trials = [best.pop(BASE), *[*best.values()][: choose.finalists]]
    request = Request("final", tuple(trial.point for trial in trials), tuple(choose.fresh), rounds)
    answers = yield request
    base, *others = [
        Finalist(trial, tuple(metric for _, metric in search.scores(trial.point, answers, "test")))
        for trial in trials
    ]
    if not base.tested:
        raise UserError(
            f"choose: {base.trial.point.name} diverged on fresh seeds",
            allowed="smaller values of train.lr",
        )
    ended = [other for other in others if other.tested]
    step = (search.metric == "accuracy") / test_samples
    candidates = len({trial.point.entry for trial in result.trials})
    return Decision(
        base=base,
        finalists=tuple(_compared(candidate, base, step, len(ended)) for candidate in ended),
        diverged=tuple(other.trial.point for other in others if not other.tested),
        result=result,
        rounds=result.rounds + request.cost,
        exhaustive=candidates * len(search.seeds) * rounds + request.cost,
        metric=search.metric,
        samples=samples,
        models=search.models if search.is_by_owner else {},
    )


def _compared(finalist: Finalist, base: Finalist, step: float, comparisons: int) -> Finalist:
    """Compares a finalist with FedAvg. `step`: one test sample."""
    ours, theirs = (dict(enumerate(each.tested)) for each in (finalist, base))
    comparison = paired(finalist.trial.point.name, ours, theirs, step)
    half = per_deviation(len(ours), LEVEL / comparisons) * comparison.deviation
    ends = comparison.mean - half, comparison.mean + half
    needed = seeds_needed(comparison, comparisons)
    return Finalist(finalist.trial, finalist.tested, comparison.mean, *ends, needed)
