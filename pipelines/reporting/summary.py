"""Numbers of the report: means and spreads over seeds, ranks, differences to FedAvg seed by seed."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fedml_noniid.pipelines.experiment.results import RERUN, Result, table
from fedml_noniid.plugins.core.errors import UserError

LAST_ROUNDS = 5
BASELINE = "fedavg"
PUBLIC_MARKS = {"labelled": "†", "unlabelled": "‡"}


class Spread(NamedTuple):
    """Mean and sample standard deviation (n - 1 in the denominator) over `n` seeds; no `std` for one seed."""

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
    rank: int  # from 1; 0 for a line that is not compared
    finals: Mapping[int, float]  # test accuracy after the last round, by seed
    weights: Mapping[int, str]  # SHA-256 of the final weights, by seed
    difference: Spread | None  # final accuracy minus the baseline's of the same seed
    worst: Spread | None  # lowest accuracy of any client
    noisy: Spread | None  # final accuracy on copies of the test set in each client's noise; None without noise
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
        """The recipe's name, with a mark if it sees public data or the test set."""
        mark = PUBLIC_MARKS.get(self.public, "")
        return self.recipe + (f" {mark}" if mark and not self.leak else "") + (" LEAK" if self.leak else "")


@dataclass(frozen=True)
class Scenario:
    """The lines of one scenario, best first."""

    name: str
    lines: tuple[Line, ...]
    baseline: Line | None
    results: tuple[Result, ...]
    missing: tuple[str, ...]  # items of params.yaml without a result
    test_samples: int | None  # None if nothing is evaluated


def spread(values: Iterable[float]) -> Spread | None:
    """None for no values."""
    known = list(values)
    if not known:
        return None
    return Spread(statistics.fmean(known), statistics.stdev(known) if len(known) > 1 else None, len(known))


def scenario(name: str, results: Sequence[Result], recipes: Sequence[str], seeds: Sequence[int]) -> Scenario | None:
    """Sums up the results of one scenario for the named recipes and seeds. None if none of them has finished."""
    present = [r for r in results if r.scenario == name and r.recipe in recipes and r.seed in seeds and _accuracy(r)]
    by_recipe = {recipe: [r for r in present if r.recipe == recipe] for recipe in recipes}
    # An entry of another name may be plain FedAvg too.
    plain = {r.recipe for r in present if r.composition == BASELINE}
    base = next(iter(sorted(filter(plain.__contains__, recipes), key=lambda recipe: recipe != BASELINE)), None)
    lines = [_line(group, by_recipe[base] if base not in (None, r) else []) for r, group in by_recipe.items() if group]
    if not lines:
        return None
    ranked = _ranked(lines)
    found = {(r.recipe, r.seed) for r in present}
    return Scenario(
        name=name,
        lines=ranked,
        baseline=next((line for line in ranked if line.recipe == base), None),
        results=tuple(present),
        missing=tuple(f"{name}-{r}-{seed}" for r in recipes for seed in seeds if (r, seed) not in found),
        test_samples=next((n for n in map(_test_samples, present) if n), None),
    )


def _accuracy(result: Result) -> list[float]:
    return result.column("test_accuracy")


def _test_samples(result: Result) -> int | None:
    """The size of the test set, from the evaluation. All runs of an experiment have the same test set."""
    path = next((path for path in result.files if path.name == "per_class.csv"), None)
    if path is None:
        return None
    try:
        return sum(int(row["samples"]) for row in table(path))
    except (KeyError, ValueError):
        raise UserError(f"{path}: has no column samples of whole numbers; {RERUN}") from None


def _line(group: Sequence[Result], base: Sequence[Result]) -> Line:
    """Sums up one recipe's results; the rank is set by `_ranked`."""
    finals, base_final = ({r.seed: _accuracy(r)[-1] for r in runs} for runs in (group, base))
    differences = [final - base_final[seed] for seed, final in finals.items() if seed in base_final]
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
        worst=spread(min(r.client_accuracy) for r in group if r.client_accuracy),
        noisy=spread(r.evaluation["accuracy_noisy"] for r in group if "accuracy_noisy" in r.evaluation),
        traffic_round=_known(statistics.fmean(t) for t in traffic),
        traffic_total=_known(sum(t) for t in traffic),
        public=_tag(group[0], "public"),
        leak=_tag(group[0], "leak"),
        federated=group[0].tags.get("federated", "yes") == "yes",
        remark=_tag(group[0], "own_models") or _tag(group[0], "no_effect"),
    )


def _tag(result: Result, name: str) -> str:
    """A tag of the item; "" for "none"."""
    value = result.tags.get(name, "none")
    return "" if value == "none" else value


def _known(values: Iterable[float]) -> Spread:
    """The spread of at least one value."""
    known = spread(values)
    assert known is not None
    return known


def _ranked(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Best mean final accuracy first, then the lines that are not compared. Equal means share a rank."""
    ordered = sorted((line for line in lines if line.compared), key=lambda line: -line.final.mean)
    means = [line.final.mean for line in ordered]
    ranked = [dataclasses.replace(line, rank=means.index(line.final.mean) + 1) for line in ordered]
    return (*ranked, *sorted((line for line in lines if not line.compared), key=lambda line: -line.final.mean))
