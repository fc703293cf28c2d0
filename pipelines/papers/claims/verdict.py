"""Verdicts: paired by seed, t interval and sign test, Holm's adjustment over all claims of the
page.

The statistics are those of pipelines/reporting/comparison.py. A claim may have several parts, for
instance one per other method. It holds only if every part does, so its weakest part decides: the
part with the lowest t. If that part points the wrong way, its p is multiplied by the number of
parts, since it was chosen among them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fedml_noniid.pipelines.papers.claims.published import Published
from fedml_noniid.pipelines.papers.claims.quantities import (
    Part,
    beside,
    is_counted,
    never,
    parts,
    step,
)
from fedml_noniid.pipelines.papers.claims.runs import Ran
from fedml_noniid.pipelines.papers.claims.spec import Named
from fedml_noniid.pipelines.papers.targets.measured import Measured
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

    part: Part
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
    def mean(self) -> float:
        """Of the tested number itself."""
        return self.compared.mean + self.bound

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 %, of the tested number itself, before Holm's adjustment."""
        if self.compared.low is None or self.compared.high is None:
            return None
        return self.compared.low + self.bound, self.compared.high + self.bound


class Verdict(NamedTuple):
    """What our runs say about a claim."""

    named: Named
    parts: tuple[Part, ...]
    tested: tuple[Tested, ...]
    weakest: Tested | None
    missing: tuple[str, ...]  # planned runs that have not ended
    diverged: tuple[str, ...]  # runs that ended without a model
    counted: bool
    runs: tuple[Ran, ...]  # that ended, the diverged ones among them
    published: bool = False  # whether the numbers are the committed ones
    p: float = 1.0  # of the weakest part
    holm_p: float = 1.0  # after Holm's adjustment for all claims of the page
    tests: int = 1  # claims that Holm adjusts for
    beside: tuple[Part, ...] = ()  # numbers that are shown and not tested

    @property
    def word(self) -> str:
        """One of VERDICTS."""
        if self.missing:
            return NOT_RUN
        if self.diverged or self.weakest is None:
            return UNDECIDED
        if self.counted:
            sides = [
                [one.side * difference > 0 for difference in one.compared.differences]
                for one in self.tested
            ]
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
        found = [never(self.named, part) for part in self.parts]
        return len(set().union(*(late for late, _ in found))), len(
            set().union(*(every for _, every in found))
        )

    @property
    def seeds_needed(self) -> int | None:
        """The fewest seeds that would decide it, if mean and deviation stay.

        None: more than a hundred, or no test.
        """
        if self.counted or self.weakest is None or self.weakest.compared.p is None:
            return None
        return seeds_needed(self.weakest.compared, self.tests)


def judged(measured: Measured, named: Named, published: Published | None = None) -> Verdict:
    """A claim by itself, before Holm's adjustment.

    `published`: where its numbers are if not all runs are here.
    """
    claim = named.claim
    runs = {ran.item: ran for s, r in claim.cells for ran in _ran(measured, claim.study, s, r)}
    known = (
        published is not None
        and not all(item in runs for item in named.items)
        and published.has(named)
    )
    if published is not None and known:
        runs = {item: published.runs[named.paper, claim.study][item] for item in named.items}
        every = published.parts(named)
    else:
        every = (*parts(named, measured), *beside(named, measured))
    found = tuple(part for part in every if part.is_tested)
    shown = tuple(part for part in every if not part.is_tested)
    missing = tuple(item for item in named.items if item not in runs)
    # Where no run reaches the accuracy, the rounds until then are unknown. That all numbers are
    # equal says nothing.
    compared = [part for part in found if not _all_late(named, part)]
    tested = tuple(one for part in compared for one in _tested(named, part))
    # A seed without the number, for instance one that is not finite, may be unlike the others.
    seeds = len(named.study.content["seeds"])
    complete = all(len(one.compared.differences) == seeds for one in tested)
    whole = len(tested) > 0 and len(compared) == len(found) and complete
    weakest = min(tested, key=lambda one: one.t) if whole else None
    diverged = tuple(item for item in named.items if item in runs and runs[item].diverged)
    counted = is_counted(claim)
    p = 1.0
    if (
        weakest is not None
        and weakest.compared.p is not None
        and not (missing or diverged or counted)
    ):
        p = weakest.compared.p if weakest.t > 0 else min(1.0, len(tested) * weakest.compared.p)
    return Verdict(
        named,
        found,
        tested,
        weakest,
        missing,
        diverged,
        counted,
        tuple(runs.values()),
        known,
        p,
        beside=shown,
    )


def _all_late(named: Named, part: Part) -> bool:
    late, every = never(named, part)
    return bool(late) and late == every


def _ran(measured: Measured, study: str, scenario: str, recipe: str) -> list[Ran]:
    """The runs of a method on a scenario that ended."""
    at = {"study": study, "scenario": scenario, "recipe": recipe}
    early = [
        Ran.ended_early(study, f"{scenario}-{recipe}-{seed}") for seed in measured.diverged(at)
    ]
    return [*(Ran.of(study, run) for run in measured.runs(at)), *early]


def adjusted(found: Sequence[Verdict]) -> list[Verdict]:
    """All claims of the page, after Holm's adjustment.

    A claim that has not run counts with p = 1.
    """
    tested = [one for one in found if not one.counted]
    by_id = dict(
        zip([one.named.id for one in tested], holm([one.p for one in tested]), strict=True)
    )
    return [one._replace(holm_p=by_id.get(one.named.id, 1.0), tests=len(tested)) for one in found]


def _tested(named: Named, part: Part) -> list[Tested]:
    holds = named.claim.holds
    bounds = [
        (float(bound), side)
        for bound, side in ((holds.above, 1), (holds.below, -1))
        if bound is not None
    ]
    return [
        Tested(
            part,
            bound,
            side,
            paired(part.words, part.values, dict.fromkeys(part.values, bound), step(named.claim)),
        )
        for bound, side in bounds
    ]
