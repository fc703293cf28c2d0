"""Judges claims: paired by seed, t interval, Holm's adjustment over all claims of the page.

The statistics are those of pipelines/reporting/comparison.py. A claim may have several parts, for
instance one per other method. It holds only if every part does, so its weakest part decides: the
part with the lowest t. If that part points the wrong way, its p is multiplied by the number of
parts, since it was chosen among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd

from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.papers.claims import BESIDE, Claim, Named
from fedml_noniid.pipelines.papers.committed import RUNS, VALUES, Committed, stacked
from fedml_noniid.pipelines.papers.contrasts import ROUNDS_TO, by_seed, evaluate
from fedml_noniid.pipelines.papers.runs import Measured
from fedml_noniid.pipelines.reporting.comparison import (
    LEVEL,
    Comparison,
    holm,
    paired,
    seeds_needed,
)

HELD, NOT_HELD, UNDECIDED, NOT_RUN = "held", "not held", "undecided", "not run"
VERDICTS = (HELD, NOT_HELD, UNDECIDED, NOT_RUN)


class Tested(NamedTuple):
    """A part against one of its bounds. The differences are those to the bound."""

    part: str
    bound: float
    side: int  # 1: the claim wants it above the bound, -1: below
    compared: Comparison

    @property
    def t(self) -> float:
        """How far the mean is on the wanted side, in standard errors."""
        mean, n = self.side * self.compared.mean, len(self.compared.differences)
        error = self.compared.deviation / math.sqrt(n)
        return mean / error if error else math.copysign(math.inf, mean) if mean else 0.0

    @property
    def mean(self) -> float | None:
        """Of the tested number itself; None without a seed."""
        return self.compared.mean + self.bound if self.compared.differences else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 %, of the tested number itself, before Holm's adjustment."""
        if self.compared.low is None or self.compared.high is None:
            return None
        return self.compared.low + self.bound, self.compared.high + self.bound


class Verdict(NamedTuple):
    """What our runs say about a claim."""

    named: Named
    values: pd.DataFrame  # VALUES: a line for each value of a seed, tested or shown beside
    runs: pd.DataFrame  # RUNS: a line for each run that ended, the diverged ones among them
    tested: tuple[Tested, ...]
    weakest: Tested | None
    is_committed: bool  # whether the numbers are the committed ones
    p: float = 1.0  # of the weakest part
    holm_p: float = 1.0  # after Holm's adjustment for all claims of the page
    n_tests: int = 1  # claims that Holm adjusts for

    @property
    def claim(self) -> Claim:
        """What is tested."""
        return self.named.claim

    @property
    def counted(self) -> bool:
        """Whether the number is counted, so that no test over seeds is needed."""
        return self.claim.is_counted

    @property
    def missing(self) -> list[str]:
        """Planned runs that have not ended."""
        ended = set(self.runs["item"])
        return [item for item in self.named.items if item not in ended]

    @property
    def diverged(self) -> list[str]:
        """Runs that ended without a model."""
        ended = set(self.runs["item"][self.runs["accuracy"].isna()])
        return [item for item in self.named.items if item in ended]

    @property
    def word(self) -> str:
        """One of VERDICTS."""
        if self.missing:
            return NOT_RUN
        if self.diverged or self.weakest is None:
            return UNDECIDED
        if self.counted:
            sides = [[one.side * d > 0 for d in one.compared.differences] for one in self.tested]
            if all(map(all, sides)):
                return HELD
            return UNDECIDED if all(map(any, sides)) else NOT_HELD
        if self.holm_p < LEVEL:
            return HELD if self.weakest.t > 0 else NOT_HELD
        return UNDECIDED

    @property
    def never(self) -> tuple[int, int]:
        """How many runs never reach the accuracy of `rounds_to`, and of how many; zeros for another
        statistic."""
        late, every = _late(self.named, self.values[self.values["role"] != BESIDE])
        return len(late), len(every)

    @property
    def seeds_needed(self) -> int | None:
        """The fewest seeds that would decide it, if mean and deviation stay.

        None: more than a hundred, or no test.
        """
        if self.counted or self.weakest is None or self.weakest.compared.p is None:
            return None
        return seeds_needed(self.weakest.compared, self.n_tests)


def adjust(found: Sequence[Verdict]) -> list[Verdict]:
    """All claims of the page, after Holm's adjustment.

    A claim that has not run counts with p = 1.
    """
    tested = [one for one in found if not one.counted]
    adjusted = iter(holm([one.p for one in tested]))
    return [
        one._replace(holm_p=1.0 if one.counted else next(adjusted), n_tests=len(tested))
        for one in found
    ]


def judge(named: Named, measured: Measured, committed: Committed) -> Verdict:
    """A claim by itself, before Holm's adjustment.

    `committed`: the numbers of claims whose runs are not all here.
    """
    runs = pd.DataFrame(_runs(named, measured), columns=RUNS)
    runs = runs.astype(dict.fromkeys(("accuracy", "mib", "seconds"), float))
    is_here = set(named.items) <= set(runs["item"])
    is_committed = not is_here and committed.has(named)
    if is_committed:
        runs, values = committed.runs_of(named), committed.values_of(named)
    else:
        parts = (evaluate(one, measured).assign(part=one.words) for one in named.claim.contrasts())
        values = stacked(parts, VALUES)
    found = Verdict(named, values, runs, *_tested(named, values), is_committed)
    if found.missing or found.diverged or found.counted or found.weakest is None:
        return found
    p = found.weakest.compared.p
    if p is None:
        return found
    return found._replace(p=p if found.weakest.t > 0 else min(1.0, len(found.tested) * p))


def _tested(named: Named, values: pd.DataFrame) -> tuple[tuple[Tested, ...], Tested | None]:
    """Every part against every bound, and the weakest of them.

    None is the weakest if a seed lacks the number (it may be unlike the others), and if no run of a
    part reaches the accuracy: that all numbers are equal says nothing then.
    """
    claim, found, is_whole = named.claim, [], True
    # The smallest step of a number that counts rounds.
    step = abs(float(claim.scale)) if claim.statistic.startswith("rounds_to:") else 0.0
    step = 0.0 if claim.contrast == "trend" else step
    for words in [one.words for one in claim.contrasts() if one.places[0][0] != BESIDE]:
        part = values[values["part"] == words]
        late, every = _late(named, part)
        if late and late == every:
            is_whole = False
            continue
        numbers = by_seed(part)
        is_whole = is_whole and len(numbers) == len(named.study.content["seeds"])
        for bound, side in claim.holds.bounds:
            compared = paired(words, numbers, dict.fromkeys(numbers, bound), step)
            found.append(Tested(words, bound, side, compared))
    return tuple(found), min(found, key=lambda one: one.t) if is_whole and found else None


def _late(named: Named, values: pd.DataFrame) -> tuple[set[str], set[str]]:
    """The runs that never reach the accuracy of `rounds_to`, and all runs.

    Both are empty for another statistic.
    """
    if ROUNDS_TO.fullmatch(named.claim.statistic) is None:
        return set(), set()
    most = named.claim.scale * (named.study.content["train"]["rounds"] + 1)
    return set(values["item"][values["value"] >= most]), set(values["item"])


def _runs(named: Named, measured: Measured) -> list[dict[str, Any]]:
    """The runs of a claim that ended."""
    found = []
    for scenario, recipe in named.claim.cells:
        place = {"study": named.claim.study, "scenario": scenario, "recipe": recipe}
        group = measured.group(place)
        found += [_run(named.claim.study, run) for run in group.runs]
        empty = dict.fromkeys(RUNS[5:], "") | {"study": named.claim.study}
        found += [empty | {"item": f"{scenario}-{recipe}-{seed}"} for seed in group.diverged]
    return found


def _run(study: str, run: ItemResult) -> dict[str, Any]:
    tags = run.tags
    return {
        "study": study,
        "item": run.key,
        "accuracy": run.column("test_accuracy")[-1],  # on the test set, last round
        "mib": run.evaluation.get("traffic_mib"),  # really sent, both ways
        "seconds": sum(run.seconds) if run.seconds else None,  # of all rounds
        "weights_sha256": tags["weights_sha256"],
        "fingerprint": tags.get("fingerprint", ""),
        "mlflow_run": str(run.made.get("run_id", "")),
        "commit": tags.get("git_commit", ""),
        "cpu": tags.get("cpu", ""),
        "torch": tags.get("torch", ""),
    }
