"""Numbers of the report: means and spreads over seeds, ranks, differences to FedAvg seed by
seed."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedml_noniid.pipelines.experiment.results import RERUN, ItemResult, table
from fedml_noniid.plugins.core.errors import UserError

LAST_ROUNDS = 5
BASELINE = "fedavg"
MAJORITY, OWN_MAJORITY = "majority class", "own majority class"
MEASURES = (
    "majority_accuracy",
    "balanced_accuracy",
    "macro_f1",
    "classes_named",
)  # of metrics.json
TINY = 1e-9  # far below one test sample: two accuracies that differ by less are equal
PUBLIC_MARKS = {"labelled": "†", "unlabelled": "‡"}


class Spread(NamedTuple):
    """Mean and sample standard deviation (n - 1 in the denominator) over `n` seeds; no `std` for
    one seed."""

    mean: float
    std: float | None
    n: int


@dataclass(frozen=True)
class Line:
    """One recipe on one scenario. Accuracies are fractions in [0, 1], traffic is in bytes."""

    recipe: str
    composition: str
    seeds: tuple[int, ...]
    rounds: int
    final: Spread  # test accuracy after the last round
    last: Spread  # mean test accuracy of the last five evaluated rounds
    best: Spread  # highest test accuracy of any round
    rank: int  # from 1; 0 for a line that is not compared, or no better than a constant answer
    finals: Mapping[int, float]  # test accuracy after the last round, by seed
    weights: Mapping[int, str]  # SHA-256 of the final weights, by seed
    difference: Spread | None  # final accuracy minus the baseline's of the same seed
    majority: (
        Spread | None
    )  # accuracy of always naming the most frequent class, on the same test samples
    balanced: Spread | None  # mean of the accuracies on each class
    f1: Spread | None  # mean of the F1 of each class
    one_class: tuple[int, ...]  # seeds on which the model names one class for all test samples
    is_above_majority: (
        bool  # by more than one test sample, in the mean over seeds; True if not known
    )
    worst: Spread | None  # lowest accuracy of any client
    noisy: (
        Spread | None
    )  # final accuracy on copies of the test set in each client's noise; None without noise
    traffic_round: Spread  # up and down, whole cohort, one round
    traffic_total: Spread
    public: str  # the public split as it sees it: "labelled", "unlabelled", or ""
    leak: str  # how it sees the test set, in words, or ""
    federated: bool
    remark: str = ""  # what a reader of its accuracies must know

    @property
    def compared(self) -> bool:
        """Whether it has a rank: a federated recipe that has not seen the test set."""
        return self.federated and not self.leak

    @property
    def label(self) -> str:
        """The recipe's name, with a mark if it sees public data or the test set, or names one class
        only."""
        mark = PUBLIC_MARKS.get(self.public, "")
        words = (
            [self.recipe]
            + ([mark] if mark and not self.leak else [])
            + (["LEAK"] if self.leak else [])
        )
        return " ".join(words + (["ONE CLASS"] if self.one_class else []))

    @property
    def is_constant(self) -> bool:
        """Whether it is no better than a constant answer, or names one class only on a seed."""
        return bool(self.one_class) or not self.is_above_majority


@dataclass(frozen=True)
class Scenario:
    """The lines of one scenario, best first."""

    name: str
    lines: tuple[Line, ...]
    baseline: Line | None
    majority: Mapping[str, Spread]  # accuracy of a constant answer, by its name
    results: tuple[ItemResult, ...]
    missing: tuple[str, ...]  # items of params.yaml without a result
    test_samples: int | None  # None if nothing is evaluated


def spread(values: Iterable[float]) -> Spread | None:
    """None for no values."""
    known = list(values)
    if not known:
        return None
    return Spread(
        statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known)
    )


def scenario(
    name: str,
    results: Sequence[ItemResult],
    recipes: Sequence[str],
    seeds: Sequence[int],
    test_samples: int | None = None,
) -> Scenario | None:
    """Sums up the results of one scenario for the named recipes and seeds.

    None if none of them has finished.

    `test_samples`: the size of the test set. Without it, the files of the results have it.
    """
    present = [
        r
        for r in results
        if r.scenario == name and r.recipe in recipes and r.seed in seeds and _accuracy(r)
    ]
    by_recipe = {recipe: [r for r in present if r.recipe == recipe] for recipe in recipes}
    # An entry of another name may be plain FedAvg too.
    plain = {r.recipe for r in present if r.composition == BASELINE}
    base = next(
        iter(sorted(filter(plain.__contains__, recipes), key=lambda recipe: recipe != BASELINE)),
        None,
    )
    test_samples = test_samples or next((n for n in map(_test_samples, present) if n), None)
    lines = [
        _line(
            group,
            by_recipe[base] if base not in (None, r) else [],
            1 / test_samples if test_samples else 0.0,
        )
        for r, group in by_recipe.items()
        if group
    ]
    if not lines:
        return None
    ranked = _ranked(lines)
    found = {(r.recipe, r.seed) for r in present}
    return Scenario(
        name=name,
        lines=ranked,
        baseline=next((line for line in ranked if line.recipe == base), None),
        majority=_majority(present),
        results=tuple(present),
        missing=tuple(
            f"{name}-{r}-{seed}" for r in recipes for seed in seeds if (r, seed) not in found
        ),
        test_samples=test_samples,
    )


def _accuracy(result: ItemResult) -> list[float]:
    return result.column("test_accuracy")


def _test_samples(result: ItemResult) -> int | None:
    """The size of the test set, from the evaluation.

    All runs of an experiment have the same test set.
    """
    path = next((path for path in result.files if path.name == "per_class.csv"), None)
    if path is None:
        return None
    try:
        return sum(int(row["samples"]) for row in table(path))
    except (KeyError, ValueError):
        raise UserError(f"{path}: has no column samples of whole numbers; {RERUN}") from None


def _majority(results: Sequence[ItemResult]) -> dict[str, Spread]:
    """The accuracy of always naming the most frequent class: of all training data, or of each
    client's own."""
    found: dict[str, dict[int, float]] = {}
    for r in results:
        if "majority_accuracy" in r.evaluation:
            name = OWN_MAJORITY if _tag(r, "own_models") else MAJORITY
            found.setdefault(name, {})[r.seed] = r.evaluation["majority_accuracy"]
    return {name: _known(by_seed.values()) for name, by_seed in found.items()}


def _line(group: Sequence[ItemResult], base: Sequence[ItemResult], step: float) -> Line:
    """Sums up one recipe's results; the rank is set by `_ranked`. `step`: one test sample."""
    finals, base_final = ({r.seed: _accuracy(r)[-1] for r in runs} for runs in (group, base))
    differences = [final - base_final[seed] for seed, final in finals.items() if seed in base_final]
    measured = {
        name: {r.seed: float(r.evaluation[name]) for r in group if name in r.evaluation}
        for name in MEASURES
    }
    above = spread(finals[seed] - value for seed, value in measured["majority_accuracy"].items())
    traffic = [[row["bytes_up"] + row["bytes_down"] for row in r.rows] for r in group]
    return Line(
        recipe=group[0].recipe,
        composition=group[0].composition,
        seeds=tuple(sorted(r.seed for r in group)),
        rounds=max(len(r.rows) for r in group),
        final=_known(finals.values()),
        last=_known(statistics.fmean(_accuracy(r)[-LAST_ROUNDS:]) for r in group),
        best=_known(max(_accuracy(r)) for r in group),
        rank=0,
        finals=finals,
        weights={r.seed: r.tags["weights_sha256"] for r in group},
        difference=spread(differences),
        majority=spread(measured["majority_accuracy"].values()),
        balanced=spread(measured["balanced_accuracy"].values()),
        f1=spread(measured["macro_f1"].values()),
        one_class=tuple(sorted(seed for seed, n in measured["classes_named"].items() if n == 1)),
        is_above_majority=above is None or above.mean > step + TINY,
        worst=spread(min(r.client_accuracy) for r in group if r.client_accuracy),
        noisy=spread(
            r.evaluation["accuracy_noisy"] for r in group if "accuracy_noisy" in r.evaluation
        ),
        traffic_round=_known(statistics.fmean(t) for t in traffic),
        traffic_total=_known(sum(t) for t in traffic),
        public=_tag(group[0], "public"),
        leak=_tag(group[0], "leak"),
        federated=group[0].tags.get("federated", "yes") == "yes",
        remark="; ".join(
            filter(
                None, [_tag(group[0], "own_models") or _tag(group[0], "no_effect"), _stopped(group)]
            )
        ),
    )


def _tag(result: ItemResult, name: str) -> str:
    """A tag of the item; "" for "none"."""
    value = result.tags.get(name, "none")
    return "" if value == "none" else value


def _stopped(group: Sequence[ItemResult]) -> str:
    """How many runs a callback has stopped, and after which rounds; "" for none."""
    rounds = [str(len(result.rows)) for result in group if _tag(result, "stopped")]
    return (
        f"{len(rounds)} of {len(group)} runs stopped early, after round {', '.join(rounds)}"
        if rounds
        else ""
    )


def _known(values: Iterable[float]) -> Spread:
    """The spread of at least one value."""
    known = spread(values)
    assert known is not None
    return known


def _ranked(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Best mean final accuracy first, then the lines that are not compared.

    Equal means share a rank.

    A line that is no better than a constant answer has no rank.
    """
    ordered = sorted((line for line in lines if line.compared), key=lambda line: -line.final.mean)
    means = [line.final.mean for line in ordered if not line.is_constant]
    ranked = [
        line
        if line.is_constant
        else dataclasses.replace(line, rank=means.index(line.final.mean) + 1)
        for line in ordered
    ]
    return (
        *ranked,
        *sorted((line for line in lines if not line.compared), key=lambda line: -line.final.mean),
    )
