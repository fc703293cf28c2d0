"""Judges claims: paired by seed, t interval, Holm's adjustment over all claims of a section.

The statistics are those of pipelines/reporting/comparison.py. A claim may have several parts, for
instance one per other method. It holds only if every part does, so its weakest part decides: the
part with the lowest t. If that part points the wrong way, its p is multiplied by the number of
parts, since it was chosen among them. A part that is the same on every seed has no test and no p
below 1. Looks at growing numbers of seeds spend one level, by research/looks.py, and a
claim stops at the first look that decides it.

A claim that is neither held nor not held may have "no gain above x": two one-sided tests against
the margin x and against -x, by intervals that hold at once for all numbers of the section
(Bonferroni). The first test gives the verdict if it rejects for every part, the second a remark.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pandas as pd

from fedml_noniid.pipelines.experiment.results import ItemResult
from fedml_noniid.pipelines.reporting.comparison import (
    LEVEL,
    MOST_SEEDS,
    Comparison,
    holm,
    interval,
    paired,
    power,
)
from fedml_noniid.pipelines.reporting.summary import TINY, Spread
from research.claims import BESIDE, Claim, Named, Printed
from research.committed import RUNS, VALUES, Committed, stacked
from research.contrasts import ACCURACY, ROUNDS_TO, by_seed, evaluate, step
from research.looks import T_EXCESS, levels, p_of_look
from research.runs import Measured

HELD, NOT_HELD, NO_GAIN, UNDECIDED = "held", "not held", "no gain above x", "undecided"
NOT_TESTABLE, NOT_RUN = "not testable here", "not run"
VERDICTS = (HELD, NOT_HELD, NO_GAIN, UNDECIDED, NOT_TESTABLE, NOT_RUN)
LEVELS = re.compile(r"final|best|last\d+")  # accuracies of single runs, as papers print them
CHANCE, NEAR_CHANCE, CEILING = 0.1, 0.05, 0.99
POWER = 0.8  # of the number of seeds that would decide it
COLUMNS = ["paper", "claim", "part", "statistic", "wanted", "mean", "low", "high"]
COLUMNS += ["low_adjusted", "high_adjusted", "seeds", "signs", "p", "holm_p", "seeds_needed"]
COLUMNS += ["margin", "post_hoc", "ours", "printed_effect", "fedavg_here", "fedavg_paper"]
COLUMNS += ["weakest", "verdict", "gate", "withdrawn"]


class Tested(NamedTuple):
    """A part against one of its bounds. The differences are those to the bound."""

    part: str
    bound: float
    side: int  # 1: the claim wants it above the bound, -1: below
    compared: Comparison
    level: float = LEVEL  # of the adjusted interval

    @property
    def t(self) -> float:
        """How far the mean is on the wanted side, in standard errors; 0 where there is no test."""
        mean, n = self.side * self.compared.mean, len(self.compared.differences)
        return mean / self.compared.deviation * math.sqrt(n) if self.compared.deviation else 0.0

    @property
    def mean(self) -> float | None:
        """Of the tested number itself; None without a seed."""
        return self.compared.mean + self.bound if self.compared.differences else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 %, of the tested number itself, for this number alone."""
        return None if self.compared.p is None else self._around(LEVEL)

    @property
    def adjusted(self) -> tuple[float, float] | None:
        """95 %, of the tested number itself, for all numbers of the section and all looks at once.

        None where no t test is possible.
        """
        return self._around(self.level) if self.compared.deviation else None

    def _around(self, level: float) -> tuple[float, float] | None:
        assert self.mean is not None, "it has a seed"
        n = len(self.compared.differences)
        return interval(Spread(self.mean, self.compared.deviation, n), level)

    @property
    def on_side(self) -> int:
        """Seeds on the wanted side of the bound."""
        return sum(self.side * difference > TINY for difference in self.compared.differences)


class Verdict(NamedTuple):
    """What our runs say about a claim."""

    named: Named
    all_values: pd.DataFrame  # VALUES: a line for each value of a seed, tested or shown beside
    all_runs: pd.DataFrame  # RUNS: a line for each run that ended, the diverged ones among them
    look: int  # from 0; -1: no look has all of its runs
    tested: tuple[Tested, ...]
    weakest: Tested | None
    is_committed: bool  # whether the numbers are the committed ones
    is_post_hoc: bool = False  # whether the margin is younger than the first run
    missing: tuple[str, ...] = ()  # planned runs of the look, or of the first one, without an end
    diverged: tuple[str, ...] = ()  # runs that ended without a model
    gate: str = ""  # why accuracies can't decide it here, in a sentence; "" if they can
    side: float = 1.0  # sign of t at the look
    p: float = 1.0  # of the weakest part, over the looks so far
    holm_p: float = 1.0  # after Holm's adjustment for all claims of the section
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
    def values(self) -> pd.DataFrame:
        """The values of the look."""
        seeds = self.named.seeds(max(self.look, 0))
        return self.all_values[self.all_values["seed"].isin(seeds)]

    @property
    def runs(self) -> pd.DataFrame:
        """The runs of the look."""
        return self.all_runs[self.all_runs["item"].isin(self.items)]

    @property
    def printed(self) -> Printed | None:
        """What the paper has, in the scenario of the weakest number."""
        printed = self.claim.printed
        return printed[self._scenario] if isinstance(printed, dict) else printed

    @property
    def _scenario(self) -> str:
        """That of the weakest number; the first one, where it is of none."""
        scenario = self.weakest.part.partition(":")[0] if self.weakest else ""
        return scenario if scenario in self.claim.scenarios else self.claim.cells[0][0]

    @property
    def items(self) -> list[str]:
        """The runs that it reads at its look; at the first look without one."""
        return self.named.items(max(self.look, 0))

    @property
    def word(self) -> str:
        """One of VERDICTS."""
        if self.missing:
            return NOT_RUN
        if self.diverged or self.weakest is None:
            return UNDECIDED
        if self.counted:
            sides = [[part.side * d > 0 for d in part.compared.differences] for part in self.tested]
            if all(map(all, sides)):
                return HELD
            return UNDECIDED if all(map(any, sides)) else NOT_HELD
        if self.gate:
            return NOT_TESTABLE
        if self.holm_p < LEVEL:
            return HELD if self.side > 0 else NOT_HELD
        return NO_GAIN if self._within(loss=False) else UNDECIDED

    @property
    def text(self) -> str:
        """The verdict for people: `no gain above 1 point`."""
        if self.word != NO_GAIN:
            return self.word
        unit = self.claim.unit.removesuffix("s") if self.claim.margin == 1 else self.claim.unit
        return f"no gain above {self.claim.margin:g} {unit}".rstrip()

    def _within(self, loss: bool) -> bool:
        """Whether no number may be above the margin, or with `loss` below minus the margin."""
        margin, ends = self.claim.margin, [part.adjusted for part in self.tested]
        if margin is None:
            return False
        return all(end and (end[0] > -margin if loss else end[1] < margin) for end in ends)

    @property
    def reason(self) -> str:
        """A sentence beside the verdict; "" where it needs none."""
        if self.missing:
            more = f" and {len(self.missing) - 3} more" if len(self.missing) > 3 else ""
            first = ", ".join(self.missing[:3])
            return f"{len(self.missing)} of {len(self.items)} runs are missing: {first}{more}."
        if self.diverged:
            return f"{len(self.diverged)} runs diverge: {', '.join(self.diverged)}."
        if self.weakest is None:
            if self.never[0]:
                return "Where no run reaches the accuracy, nothing is compared."
            seeds = min((len(part.compared.differences) for part in self.tested), default=0)
            return f"{seeds} of {len(self.named.seeds(self.look))} seeds have the number."
        if self.counted:
            return ""
        if not self.weakest.compared.deviation:
            return "The number is the same on every seed, so there is no t test."
        return self.gate or self._reason_of_test(self.weakest)

    def _reason_of_test(self, weakest: Tested) -> str:
        """What the numbers do not say by themselves."""
        weak = f"Weakest number: {weakest.part}. " if len(self.tested) > 1 else ""
        if self.word == NO_GAIN:
            loss = f"Nor is a loss above {self.claim.margin:g}. " if self._within(loss=True) else ""
            late = "The margin was written after the runs." if self.is_post_hoc else ""
            return f"{loss}{late}".strip()
        ends, bound = weakest.interval, weakest.bound
        assert ends is not None, "it has a deviation"
        if self.word == UNDECIDED:
            alone = ""
            if not ends[0] <= bound <= ends[1]:
                alone = (
                    f"The interval for this number alone excludes {bound:g}. That decides nothing "
                    f"where {self.n_tests} claims are tested. "
                )
            n = self.seeds_needed or f"more than {MOST_SEEDS}"
            return f"{alone}A test that decides it with a probability of 80 % needs {n} seeds."
        wide = weakest.adjusted
        if wide is not None and wide[0] <= bound <= wide[1]:
            weak += (
                "Holm's method decides it, as it tests the claims one after another. The wider "
                f"interval, for all at once, has {bound:g} in it."
            )
        return weak.strip()

    @property
    def never(self) -> tuple[int, int]:
        """How many runs never reach the accuracy of `rounds_to`, and of how many; zeros for another
        statistic."""
        late, every = _late(self.named, self.values[self.values["role"] != BESIDE])
        return len(late), len(every)

    @property
    def seeds_needed(self) -> int | None:
        """The fewest seeds that would decide it with a probability of 80 %, if means and deviations
        are the true ones. The level is the first of Holm's method and that of the last look.

        None: more than a hundred, or no test.
        """
        if self.counted or self.weakest is None or self.weakest.compared.p is None:
            return None
        return next((n for n in range(2, MOST_SEEDS + 1) if self._power(n) >= POWER), None)

    def _power(self, n: int) -> float:
        """The probability of the likeliest verdict over n seeds. Where all numbers must agree it is
        a lower bound: the probabilities that one of them does not are added."""
        level, claim = self._of_look(LEVEL / self.n_tests, -1), self.claim
        parts = [(part.side * part.compared.mean, part.compared.deviation) for part in self.tested]
        share = self._of_look(LEVEL / self.n_tests / self._numbers, -1)
        held = 1 - sum(1 - power(mean, deviation, n, level) for mean, deviation in parts)
        not_held = max(power(-mean, deviation, n, share) for mean, deviation in parts)
        if claim.margin is None:
            return max(held, not_held)
        rooms = [
            (claim.margin - part.bound - part.compared.mean, part.compared.deviation)
            for part in self.tested
        ]
        no_gain = 1 - sum(1 - power(room, deviation, n, share) for room, deviation in rooms)
        return max(held, not_held, no_gain)

    def _of_look(self, level: float, look: int) -> float:
        """What a look, or the last one (-1), has of the level that all looks share."""
        looks = fractions(self.named)
        return levels(looks, level / T_EXCESS)[look] if len(looks) > 1 else level

    @property
    def _numbers(self) -> int:
        """How many numbers are tested. A number between two bounds is one."""
        return max(1, len({part.part for part in self.tested}))

    @property
    def p_words(self) -> str:
        """`p < 0.001` or `p = 0.042`, after Holm's adjustment; "" without a test."""
        if self.counted or self.weakest is None:
            return ""
        return "p < 0.001" if self.holm_p < 0.001 else f"p = {self.holm_p:.3f}"

    @property
    def fedavg(self) -> tuple[float | None, float | None]:
        """FedAvg's accuracy here, in the scenario of the weakest number, and in the paper, %."""
        printed, scenario = self.printed, self._scenario
        rows = self.runs.set_index("item")["accuracy"]
        if LEVELS.fullmatch(self.claim.statistic):
            rows = self.values.drop_duplicates("item").set_index("item")["value"] / self.claim.scale
        here = rows[rows.index.str.rsplit("-", n=1).str[0] == f"{scenario}-fedavg"].mean()
        return None if math.isnan(here) else 100 * here, printed.fedavg if printed else None


def adjust(groups: Sequence[Sequence[Verdict]]) -> list[Verdict]:
    """All claims of a section, each with its looks so far, after Holm's adjustment.

    A claim stops at the first look that decides it: its later seeds, run for other claims, count
    for no claim's p. As long as claims are undecided that have a further look, the one at the
    earliest look goes on. With the p of others that went on, an earlier look may decide a claim
    after all: it goes back to it. Ties go in the order of the claims.

    A claim that has not run counts with p = 1, and so does one that is not testable. A withdrawn
    claim counts with its p: no other gains by the withdrawal. The adjusted intervals share the
    level evenly between claims, then between a claim's numbers, then between its looks.
    """
    at = [1] * len(groups)
    while True:
        shown = _shown([looks[:n] for looks, n in zip(groups, at, strict=True)])
        going = [
            i for i, verdict in enumerate(shown) if verdict.word == UNDECIDED and groups[i][at[i] :]
        ]
        early = [i for i, verdict in enumerate(shown) if max(verdict.look, 0) + 1 < at[i]]
        if going:
            at[min(going, key=at.__getitem__)] += 1
        elif early:
            # One at a time: two of them may each need the other's last p.
            at[early[0]] = shown[early[0]].look + 1
        else:
            return shown


def _shown(groups: Sequence[Sequence[Verdict]]) -> list[Verdict]:
    """Each claim at the first look that decides it with the last p of all claims, else at its last
    look."""
    ps = {index: looks[-1].p for index, looks in enumerate(groups) if not looks[0].counted}
    adjusted = [
        [_adjusted(verdict, ps, index) if index in ps else verdict for verdict in looks]
        for index, looks in enumerate(groups)
    ]
    return [
        next((verdict for verdict in looks if verdict.word != UNDECIDED), looks[-1])
        for looks in adjusted
    ]


def _adjusted(verdict: Verdict, ps: dict[int, float], index: int) -> Verdict:
    """A claim at one of its looks, with its adjusted p among the p of all claims, and the level of
    its adjusted intervals."""
    at = ps | {index: verdict.p}
    holm_p = dict(zip(at, holm([*at.values()]), strict=True))[index]
    level = verdict._of_look(LEVEL / len(ps) / verdict._numbers, max(verdict.look, 0))
    tested = tuple(part._replace(level=level) for part in verdict.tested)
    weakest = None if verdict.weakest is None else tested[verdict.tested.index(verdict.weakest)]
    return verdict._replace(holm_p=holm_p, n_tests=len(ps), tested=tested, weakest=weakest)


def judge(
    named: Named, measured: Measured, committed: Committed, is_post_hoc: bool = False
) -> list[Verdict]:
    """A claim by itself at each of its looks so far, before Holm's adjustment.

    `committed`: the numbers of claims whose runs are not all here. `is_post_hoc`: of its margin, if
    it has run.
    """
    runs = pd.DataFrame(_runs(named, measured), columns=RUNS)
    runs = runs.astype(dict.fromkeys(("accuracy", "mib", "seconds"), float))
    last, last_committed = named.reached(runs["item"]), committed.look(named)
    is_committed = last < last_committed
    if is_committed:
        last = last_committed
        runs, values = committed.runs_of(named), committed.values_of(named)
    else:
        parts = (
            evaluate(contrast, measured).assign(part=contrast.description)
            for contrast in named.claim.contrasts()
        )
        values = stacked(parts, VALUES)
    values = values[values["seed"].isin(named.seeds(max(last, 0)))]
    runs = runs[runs["item"].isin(named.items(max(last, 0)))]
    is_post_hoc = is_post_hoc and last >= 0
    verdicts: list[Verdict] = []
    for look in range(last + 1) if last >= 0 else [-1]:
        seeds = named.seeds(max(look, 0))
        tested, weakest = _tested(named, values[values["seed"].isin(seeds)], len(seeds))
        at = Verdict(named, values, runs, look, tested, weakest, is_committed, is_post_hoc)
        at = _checked(at)
        if at.gate:
            return [*verdicts, at]
        p, side = _p(at)
        # If an earlier look has the smallest p and it is small enough, that look decided the claim.
        verdicts.append(at._replace(p=min([p, *[verdict.p for verdict in verdicts]]), side=side))
    return verdicts


def _checked(verdict: Verdict) -> Verdict:
    """A claim with the runs that it lacks, and with the reason why accuracies can't decide it."""
    accuracies = verdict.runs.set_index("item")["accuracy"]
    missing = tuple(item for item in verdict.items if item not in accuracies)
    diverged = accuracies[accuracies.isna()].index
    lost = tuple(item for item in verdict.items if item in diverged)
    gate = "" if missing else _gate(verdict)
    return verdict._replace(missing=missing, diverged=lost, gate=gate)


def _gate(verdict: Verdict) -> str:
    """Why the compared accuracies say nothing, in a sentence; "" if they can decide the claim."""
    claim, tested = verdict.claim, verdict.values[verdict.values["role"] != BESIDE]
    if claim.contrast in ("level", "same") or not ACCURACY.fullmatch(claim.statistic):
        return ""
    rows = tested.assign(accuracy=tested["value"] / claim.scale)
    if claim.statistic.endswith("_std"):
        rows = tested[["scenario", "recipe", "item"]].merge(verdict.runs, on="item")
    means = rows.groupby(["scenario", "recipe"])["accuracy"].mean()
    highest, lowest = 100 * means.max(), 100 * means.min()
    if highest <= 100 * (CHANCE + NEAR_CHANCE):
        return (
            f"The compared accuracies are at most {highest:.1f} % in the mean, no more than "
            f"{100 * NEAR_CHANCE:g} points above chance: too little to compare."
        )
    if lowest >= 100 * CEILING:
        return f"The compared accuracies are at least {lowest:.1f} %: none can be much higher."
    return ""


def _p(verdict: Verdict) -> tuple[float, float]:
    """p of the weakest part, as one of all looks, and the sign of its t."""
    is_whole = not (verdict.missing or verdict.diverged or verdict.counted)
    if not is_whole or verdict.weakest is None or verdict.weakest.compared.p is None:
        return 1.0, 1.0
    is_up, p = verdict.weakest.t > 0, verdict.weakest.compared.p
    if len(verdict.named.looks) > 1:
        p = min(1.0, T_EXCESS * p_of_look(p, fractions(verdict.named)[: verdict.look + 1]))
    return (p, 1.0) if is_up else (min(1.0, verdict._numbers * p), -1.0)


def fractions(named: Named) -> tuple[float, ...]:
    """Of all seeds, at each look."""
    return tuple(n / named.looks[-1] for n in named.looks)


def lines(verdict: Verdict) -> Iterator[list[object]]:
    """The lines of claims.csv, COLUMNS: one for each part and bound."""
    claim = verdict.claim
    here, paper = verdict.fedavg
    margin = (claim.margin, "yes" if verdict.is_post_hoc else "")
    printed = verdict.printed.effect if verdict.printed else None
    about = [*margin, "yes" if claim.ours else "", printed, here, paper]
    end = [verdict.text, verdict.gate, " ".join(claim.withdrawn.split())]
    start = [verdict.named.paper, verdict.named.id]
    if not verdict.tested:
        holds = claim.holds.description
        yield [*start, None, claim.statistic, holds, *[None] * 10, *about, "", *end]
    for part in verdict.tested:
        compared, n = part.compared, len(part.compared.differences)
        wanted = f"{'above' if part.side > 0 else 'below'} {part.bound:g}"
        ps = (None, None) if verdict.counted else (compared.p, verdict.holm_p)
        is_weakest = part is verdict.weakest
        ends = [*(part.interval or (None, None)), *(part.adjusted or (None, None))]
        numbers = [
            part.mean,
            *ends,
            n,
            part.on_side,
            *ps,
            verdict.seeds_needed if is_weakest else None,
        ]
        weakest = "yes" if is_weakest else ""
        yield [*start, part.part, claim.statistic, wanted, *numbers, *about, weakest, *end]


def _tested(
    named: Named, values: pd.DataFrame, seeds: int
) -> tuple[tuple[Tested, ...], Tested | None]:
    """Every part against every bound, and the weakest of them.

    None is the weakest if a seed lacks the number (it may be unlike the others), and if no run of a
    part reaches the accuracy: that all numbers are equal says nothing then.
    """
    claim, tested, is_whole = named.claim, [], True
    # Committed numbers do not say how many test samples there were. Equal ones have no test then.
    least = 0.0 if claim.contrast == "trend" else abs(claim.scale) * step(claim.statistic, ())
    for description in [
        part.description for part in claim.contrasts() if part.places[0][0] != BESIDE
    ]:
        part = values[values["part"] == description]
        late, every = _late(named, part)
        if late and late == every:
            is_whole = False
            continue
        numbers = by_seed(part)
        is_whole = is_whole and len(numbers) == seeds
        for bound, side in claim.holds.bounds:
            compared = paired(description, numbers, dict.fromkeys(numbers, bound), least)
            tested.append(Tested(description, bound, side, compared))
    return tuple(tested), min(tested, key=lambda part: part.t) if is_whole and tested else None


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
    rows = []
    for scenario, recipe in named.claim.cells:
        address = {"study": named.claim.study, "scenario": scenario, "recipe": recipe}
        group = measured.group(address)
        rows += [_run(named.claim.study, run) for run in group.runs]
        empty = dict.fromkeys(RUNS[5:], "") | {"study": named.claim.study}
        rows += [empty | {"item": f"{scenario}-{recipe}-{seed}"} for seed in group.diverged]
    return rows


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
