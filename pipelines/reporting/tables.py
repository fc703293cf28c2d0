"""The report's table and sentences: numbers in, text out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedml_noniid.pipelines.reporting.chosen import unequal
from fedml_noniid.pipelines.reporting.comparison import (
    LEVEL,
    MOST_SEEDS,
    Comparison,
    against,
    per_deviation,
    seeds_needed,
)
from fedml_noniid.pipelines.reporting.summary import (
    BASELINE,
    MAJORITY,
    OWN_MAJORITY,
    PUBLIC_MARKS,
    Line,
    Scenario,
    Spread,
    spread,
)
from fedml_noniid.pipelines.reporting.text import NONE, as_csv

MIB = 2**20
FINAL = "last round, %"  # title of the column that the methods are ordered by
NAMED = 6  # most methods that a sentence names
COLUMNS_NOTE = (
    "Test accuracy of the global model: after the last round, mean of the last five rounds. "
    "Worst client: the lowest "
    "accuracy of any client, with test samples weighted by the client's share of each class. "
    "MiB: all clients, all "
    "rounds, up and down."
)
LEVEL_TEXT = f"{100 * LEVEL:g} %"
COMPARED_NOTE = (
    "Difference: in the last round, seed by seed, on the seeds that both methods have, in "
    "points. 95 %: interval of "
    "the paired t test, for this comparison alone; it takes the differences as normally "
    "distributed. Holm: p of the t "
    f"test, adjusted for all comparisons of the table; the verdict goes by it, at {LEVEL_TEXT}. "
    "Higher: seeds on which "
    "the method ends above the other. Sign test: on the seeds that differ."
)
BY_CLASS_NOTE = (
    "Balanced: the mean of the accuracies on each class, after the last round. Macro-F1: the "
    "mean of the "
    "F1 of each class. Both weigh rare classes like frequent ones."
)
MAJORITY_NOTES = {
    MAJORITY: (
        "the accuracy of always naming the most frequent class of the training data, on "
        "the same test samples"
    ),
    OWN_MAJORITY: (
        "the same where each client names the most frequent class of its own training data"
    ),
}
NOISY_NOTE = (
    "Noisy test: on one copy of the test set per client, each copy with that client's "
    "noise and rotation."
)
PUBLIC_NOTES = {
    "labelled": "trains on a small public labelled split (kept out of all clients' data) that "
    "the other methods do not "
    "see.",
    "unlabelled": (
        "sees the samples of the public split without their labels, which the other methods do not."
    ),
}
# Column of summary.csv: the number of a line.
SPREADS = {
    "final": "final",
    "last_5_rounds": "last",
    "best": "best",
    "majority_accuracy": "majority",
    "balanced_accuracy": "balanced",
    "macro_f1": "f1",
    "vs_baseline": "difference",
    "worst_client": "worst",
    "noisy_test": "noisy",
    "traffic_round_bytes": "traffic_round",
    "traffic_total_bytes": "traffic_total",
}
# The same of a comparison.
TESTS = {"low": "low", "high": "high", "p": "p", "p_holm": "holm_p", "p_sign": "sign_p"}


def cells(scenario: Scenario) -> list[list[str]]:
    """The table as text, the header and then the best method first: accuracies in %, differences in
    points.

    The last rows are constant answers.
    """
    marks = dict.fromkeys(_alike(scenario), " ≈") | dict.fromkeys(_same(scenario), " =")
    rows = [_row(scenario, line, marks.get(line.recipe, "")) for line in scenario.lines]
    constant = [
        dict.fromkeys(rows[0], NONE) | {"method": name, FINAL: _percent(value)}
        for name, value in scenario.majority.items()
    ]
    return [list(rows[0]), *(list(row.values()) for row in rows + constant)]


def compared(scenario: Scenario) -> list[tuple[str, list[list[str]]]]:
    """(title, table as text) of the comparisons with the baseline and with the best method."""
    base, best = scenario.baseline, _best(scenario)
    others: dict[str, Line] = {f"Compared with {base.recipe}": base} if base else {}
    if best is not None and best is not base:
        others[f"Compared with {best.recipe}, which has the best mean{_of(scenario)}"] = best
    header = [
        "method",
        "difference",
        "95 %",
        "t test, p",
        "Holm, p",
        "higher",
        "sign test, p",
        "verdict",
    ]
    tables = {
        title: [_numbers(one) for one in against(scenario, other).values()]
        for title, other in others.items()
    }
    return [(title, [header, *rows]) for title, rows in tables.items() if rows]


def summary_csv(scenarios: Iterable[Scenario]) -> bytes:
    """Every number of the tables, unrounded: accuracies as fractions, traffic in bytes; empty where
    unknown."""
    titles = [f"{column}_{part}" for column in SPREADS for part in ("mean", "std", "seeds")]
    titles += [f"{other}_{part}" for other in ("vs_baseline", "vs_best") for part in TESTS]
    lines: list[list[object]] = []
    for scenario in scenarios:
        with_base, with_best = (
            against(scenario, scenario.baseline),
            against(scenario, _best(scenario)),
        )
        for line in scenario.lines:
            parts = [
                part for name in SPREADS.values() for part in getattr(line, name) or (None, None, 0)
            ]
            for one in (with_base.get(line.recipe), with_best.get(line.recipe)):
                # Ten digits, so that they don't depend on the machine's exponential function.
                values = (getattr(one, name, None) for name in TESTS.values())
                parts += [None if value is None else float(f"{value:.10g}") for value in values]
            base = scenario.baseline.recipe if scenario.baseline else ""
            named = " ".join(map(str, line.one_class))
            lines.append(
                [
                    scenario.name,
                    line.recipe,
                    line.composition,
                    line.rank,
                    line.rounds,
                    base,
                    named,
                    *parts,
                ]
            )
    header = (
        "scenario",
        "recipe",
        "composition",
        "rank",
        "rounds",
        "baseline",
        "one_class_seeds",
        *titles,
    )
    return as_csv(header, lines, digits=None)


def headline(scenarios: Sequence[Scenario]) -> Mapping[str, Any]:
    """The metrics that DVC shows, by scenario and recipe; without the scenario if there is only
    one."""
    found = {}
    for scenario in scenarios:
        comparisons = against(scenario, scenario.baseline)
        found[scenario.name] = {
            line.recipe: _headline(line, comparisons.get(line.recipe)) for line in scenario.lines
        }
    return next(iter(found.values())) if len(found) == 1 else found


def _headline(line: Line, one: Comparison | None) -> dict[str, float]:
    """Accuracy, its standard deviation, other measures, difference to the baseline with its
    interval, in %. MiB.

    Unknown numbers are left out.
    """
    fractions = {
        "accuracy": line.final.mean,
        "spread": line.final.std,
        "majority_accuracy": line.majority.mean if line.majority else None,
        "balanced_accuracy": line.balanced.mean if line.balanced else None,
        "macro_f1": line.f1.mean if line.f1 else None,
        "worst_client": line.worst.mean if line.worst else None,
        "difference": one.mean if one and one.differences else None,
        "difference_low": one.low if one else None,
        "difference_high": one.high if one else None,
    }
    numbers = {name: 100 * value for name, value in fractions.items() if value is not None}
    # `+ 0.0`: a rounded zero has no sign.
    return {
        name: round(number, 4) + 0.0
        for name, number in (numbers | {"mib": line.traffic_total.mean / MIB}).items()
    }


def curves_csv(scenario: Scenario, recipes: Sequence[str]) -> bytes:
    """Test accuracy of each recipe, mean over seeds, by round, for `dvc plots`.

    Empty where it is not known.
    """
    measured: dict[tuple[float, str], list[float]] = {}
    for result in scenario.results:
        for row in result.rows:
            measured.setdefault((row["round"], result.recipe), []).append(row["test_accuracy"])
    lines: list[list[object]] = []
    for t in sorted({t for t, _ in measured}):
        found = (spread(filter(math.isfinite, measured.get((t, recipe), []))) for recipe in recipes)
        lines.append([int(t), *(known and known.mean for known in found)])
    return as_csv(("round", *recipes), lines, digits=None)


def notes(scenario: Scenario) -> list[str]:
    """Footnotes of the table: its columns, its marks and the runs that it lacks."""
    found = [COLUMNS_NOTE] + (
        ["± is the sample standard deviation over seeds."] if _seeds(scenario) > 1 else []
    )
    if scenario.majority:
        found.append(BY_CLASS_NOTE)
    found += [f"{name}: {MAJORITY_NOTES[name]}." for name in scenario.majority]
    if _noisy(scenario):
        found.append(NOISY_NOTE)
    if scenario.baseline is not None:
        found.append(
            f"vs {scenario.baseline.recipe}: difference in the last round, in percentage "
            "points, seed by seed. Both "
            "methods have the same partition, the same clients in each round and the same first "
            "weights."
        )
    if _alike(scenario):
        found.append(f"≈ can't be told apart from the best mean{_of(scenario)}.")
    if _same(scenario):
        found.append(
            f"= ends with the same weights as the best mean{_of(scenario)}, so it is the same "
            "method here."
        )
    if unlike := unequal(scenario.results):
        found.append(
            f"Training settings that were not the same for all methods: {', '.join(unlike)}."
        )
    if not any(result.client_accuracy for result in scenario.results):
        found.append(
            "Without an evaluation there is no accuracy of single clients, and no picture of it."
        )
    for public, mark in PUBLIC_MARKS.items():
        if any(line.public == public and not line.leak for line in scenario.lines):
            found.append(f"{mark} {PUBLIC_NOTES[public]}")
    found += [
        (
            f"{line.recipe}: is not federated. It is a bound on what the others can reach, so it "
            "has no rank."
        )
        for line in scenario.lines
        if not line.federated
    ]
    found += [
        f"LEAK: {line.recipe}: {line.leak}; its accuracy says nothing."
        for line in scenario.lines
        if line.leak
    ]
    found += [f"{line.recipe}: {line.remark}." for line in scenario.lines if line.remark]
    other = [
        f"{line.recipe} = {line.composition}"
        for line in scenario.lines
        if line.recipe != line.composition
    ]
    if other:
        found.append(f"Named variants: {', '.join(other)}.")
    if len({line.seeds for line in scenario.lines}) > 1:
        found.append(
            "The methods have different numbers of seeds (last column): compare their means "
            "with care."
        )
    if scenario.missing:
        found.append(f"Not finished, so not in the table: {', '.join(scenario.missing)}.")
    return found


def words(scenario: Scenario) -> list[str]:
    """Sentences on the numbers. They claim no more than the intervals allow."""
    return [*warnings(scenario), *answer(scenario), *details(scenario)]


def warnings(scenario: Scenario) -> list[str]:
    """Sentences on methods that are no better than a constant answer, and on the seeds with one
    class only."""
    found = []
    by_seeds: dict[tuple[int, ...], list[str]] = {}
    for line in scenario.lines:
        if line.one_class:
            by_seeds.setdefault(line.one_class, []).append(line.recipe)
    if by_seeds:
        named = "; ".join(
            (
                f"{', '.join(recipes)} (seed{'s' if len(seeds) > 1 else ''} "
                f"{', '.join(map(str, seeds))})"
            )
            for seeds, recipes in by_seeds.items()
        )
        found.append(
            f"WARNING, ONE CLASS: the model names one class for all test samples: {named}."
        )
    low = [line.recipe for line in scenario.lines if not line.is_above_majority]
    if low:
        values = " and ".join(
            f"{name}: {_percent(value)} %" for name, value in scenario.majority.items()
        )
        found.append(
            f"WARNING: no better than always naming the most frequent class ({values}): "
            f"{', '.join(low)}."
        )
    return found


def answer(scenario: Scenario) -> list[str]:
    """Which method to use, in at most three sentences: the best mean, its equals, and what would
    tell them apart."""
    best = _best(scenario)
    if best is None and any(line.compared for line in scenario.lines):
        return [
            "No method can be recommended, as each has a warning.",
            "Balanced accuracy and macro-F1 show what the models have learnt of the rare classes.",
        ]
    if best is None:
        return ["No method here can be compared."]
    over = f"{100 * best.final.mean:.2f} % ({best.final.n} seed{'s' if best.final.n > 1 else ''})"
    first = (
        f"{best.recipe} has the best mean test accuracy after the last round{_of(scenario)}, {over}"
    )
    comparisons = against(scenario, best)
    if not comparisons:
        return [f"{first}; it is the only method here."]
    others = [one for one in comparisons.values() if not one.same]
    equal = [one.recipe for one in comparisons.values() if one.same]
    if equal:
        first += (
            f", and {' and '.join(equal)} end{'s' if len(equal) == 1 else ''} with the same weights"
        )
    if not others:
        return [f"{first}."]
    tested = [one for one in others if one.p is not None]
    if not tested:
        few = (
            "Fewer than two seeds in common can't tell methods apart: any difference may be chance."
        )
        return [f"{first}.", few, "Add seeds."]
    alike = [one for one in others if one.verdict not in ("better", "worse")]
    worse = sum(one.verdict == "worse" for one in others)
    how = f"at {LEVEL_TEXT} (paired t tests over seeds, Holm's adjustment for {len(tested)})"
    if not alike:
        said = (
            [f"The {f'{worse} others are' if worse > 1 else 'other one is'} worse {how}."]
            if worse
            else []
        )
        return [f"{first}.", *said]
    named = (
        f"any of the {len(alike)} others" if NAMED < len(alike) == len(others) else _listed(alike)
    )
    return [
        f"{first}.",
        f"These seeds can't tell it apart from {named} {how}.",
        *_deciding(alike, len(tested)),
    ]


def _listed(alike: Sequence[Comparison]) -> str:
    """The first names; the others only as a number."""
    names = [one.recipe for one in alike]
    more = [f"{len(names) - NAMED} more (marked ≈)"] if len(names) > NAMED + 1 else names[NAMED:]
    *most, last = names[:NAMED] + more
    return f"{', '.join(most)} and {last}" if most else last


def _deciding(alike: Sequence[Comparison], tests: int) -> list[str]:
    """What would tell methods apart from the best."""
    if all(one.p is not None and one.is_below_a_sample for one in alike):
        return [
            (
                "Their mean differences are at most one test sample: only a larger test set could "
                "tell them apart."
            )
        ]
    gaps = [one for one in alike if one.deviation and not one.is_below_a_sample]
    if not gaps:
        return ["More seeds that all methods have would help."]
    smallest = min(gaps, key=lambda one: abs(one.mean))
    n = seeds_needed(smallest, tests)
    needed = (
        f"about {n} seeds, if mean and deviation stay as they are"
        if n
        else f"more than {MOST_SEEDS} seeds"
    )
    return [
        (
            f"The smallest gap, {abs(100 * smallest.mean):.2f} points to {smallest.recipe}, would "
            f"need {needed}."
        )
    ]


def details(scenario: Scenario) -> list[str]:
    """Sentences on the test set, on each method against the baseline, on traffic, and on what the
    tests can show."""
    return [
        _resolution(scenario),
        *_against_baseline(scenario),
        *_traffic(scenario),
        *_power(scenario),
    ]


def _resolution(scenario: Scenario) -> str:
    if not scenario.test_samples:
        return "The size of the test set is not known here, since nothing is evaluated."
    n = scenario.test_samples
    return (
        f"{n} test samples: one sample is {100 / n:.2g} points. All seeds use the same ones. So "
        "the intervals hold the "
        "chance of partition, first weights and batches, but not that of the choice of test "
        "samples."
    )


def _row(scenario: Scenario, line: Line, mark: str) -> dict[str, str]:
    """A method's cells by the title of their column.

    The noisy test has a column only where clients have noise.
    """
    base = scenario.baseline
    return {
        "method": line.label,
        FINAL: _percent(line.final),
        "last 5, %": _percent(line.last),
        "balanced, %": _percent(line.balanced),
        "macro-F1, %": _percent(line.f1),
        "rank": f"{line.rank}{mark}" if line.rank else NONE,
        f"vs {base.recipe if base else BASELINE}": NONE
        if line is base
        else _percent(line.difference, sign="+"),
        "worst client, %": _percent(line.worst),
        **({"noisy test, %": _percent(line.noisy)} if _noisy(scenario) else {}),
        "MiB total": _scaled(line.traffic_total),
        "seeds": str(len(line.seeds)),
    }


def _noisy(scenario: Scenario) -> bool:
    return any(line.noisy for line in scenario.lines)


def _percent(value: Spread | None, sign: str = "") -> str:
    if value is None:
        return NONE
    mean = f"{100 * value.mean:{sign}.2f}"
    return mean if value.std is None else f"{mean} ± {100 * value.std:.2f}"


def _scaled(value: Spread) -> str:
    """MiB with three significant digits, never in exponent form."""
    mib = value.mean / MIB
    return f"{mib:#.3g}".rstrip(".") if mib < 1000 else f"{mib:.0f}"


def _seeds(scenario: Scenario) -> int:
    return max(len(line.seeds) for line in scenario.lines)


def _best(scenario: Scenario) -> Line | None:
    """The line with the best mean of those without a warning."""
    return next((line for line in scenario.lines if line.rank), None)


def _of(scenario: Scenario) -> str:
    """Whose best mean that of `_best` is: "" where no method without a rank is above it."""
    first = next((line for line in scenario.lines if line.compared), None)
    return "" if first is _best(scenario) else " of the methods without a warning"


def _alike(scenario: Scenario) -> set[str]:
    """The methods that are tested and can't be told apart from the best mean."""
    found = against(scenario, _best(scenario)).items()
    return {
        recipe
        for recipe, one in found
        if one.p is not None and one.verdict not in ("better", "worse")
    }


def _same(scenario: Scenario) -> set[str]:
    """The methods with the weights of the method that has the best mean."""
    return {recipe for recipe, one in against(scenario, _best(scenario)).items() if one.same}


def _numbers(one: Comparison) -> list[str]:
    """A comparison's cells."""
    if not one.differences:
        return [one.recipe, *[NONE] * 6, one.verdict]
    interval = (
        NONE
        if one.low is None or one.high is None
        else f"{_points(one.low)} to {_points(one.high)}"
    )
    tests = [
        NONE if p is None else f"{p:.3f}" if p >= 0.001 else "<0.001"
        for p in (one.p, one.holm_p, one.sign_p)
    ]
    higher = f"{one.higher} of {len(one.differences)}"
    return [one.recipe, _points(one.mean), interval, *tests[:2], higher, tests[2], one.verdict]


def _points(difference: float) -> str:
    return f"{100 * difference:+z.2f}"


def _against_baseline(scenario: Scenario) -> list[str]:
    if scenario.baseline is None:
        return ["There are no results of plain FedAvg here to compare with."]
    base = scenario.baseline.recipe
    groups = {
        "better": f"Better than {base}",
        "constant": f"Above {base}, but with a warning",
        "worse": f"Worse than {base}",
        "same weights": f"Equal to {base}, with the same weights on all seeds that both have",
        "no difference": f"No difference to {base} that this test set can show",
        "unadjusted": (
            f"Undecided against {base}, since Holm's adjustment does not confirm the interval"
        ),
        "undecided": f"Undecided against {base}",
        "one seed": f"One seed in common with {base}, so no interval",
        "no seed": f"No seed in common with {base}",
    }
    named: dict[str, list[str]] = {group: [] for group in groups}
    constant = {line.recipe for line in scenario.lines if line.is_constant}
    for one in against(scenario, scenario.baseline).values():
        group = one.verdict
        if group == "undecided" and one.p is not None and one.p < LEVEL:
            group = "unadjusted"
        if group == "better" and one.recipe in constant:
            group = "constant"
        named[group].append(_claim(one))
    return [f"{groups[group]}: {', '.join(claims)}." for group, claims in named.items() if claims]


def _claim(one: Comparison) -> str:
    """`scaffold (by 8.52 to 13.48 points)`: no more than the interval says."""
    if one.same or not one.differences:
        return one.recipe
    if one.low is None or one.high is None:
        return f"{one.recipe} ({_points(one.mean)} points)"
    if one.low == one.high:
        return (
            f"{one.recipe} ({_points(one.mean)} points on each of {len(one.differences)} "
            "seeds: they do not vary)"
        )
    if one.verdict in ("better", "worse"):
        low, high = sorted((abs(100 * one.low), abs(100 * one.high)))
        return f"{one.recipe} (by {low:.2f} to {high:.2f} points)"
    return f"{one.recipe} (from {_points(one.low)} to {_points(one.high)} points)"


def _traffic(scenario: Scenario) -> list[str]:
    """The methods whose traffic differs from the baseline's by at least 5 %."""
    if scenario.baseline is None or scenario.baseline.traffic_round.mean == 0:
        return []
    base = scenario.baseline.traffic_round
    known = [
        (line.recipe, line.traffic_round.mean / base.mean)
        for line in scenario.lines
        if line.federated
    ]
    other = [f"{recipe} {ratio:.2g} times" for recipe, ratio in known if abs(ratio - 1) >= 0.05]
    text = f"Traffic: {scenario.baseline.recipe} moves {_scaled(base)} MiB per round"
    return [f"{text}; {', '.join(other)} as much." if other else f"{text}, and so do the others."]


def _power(scenario: Scenario) -> list[str]:
    """What so many comparisons over so many seeds can show."""
    n, comparisons = _seeds(scenario), against(scenario, scenario.baseline or _best(scenario))
    others = sum(one.p is not None for one in comparisons.values())
    if n == 1:
        return [
            "One seed has no interval and no test, so every difference may be chance. Add seeds."
        ]
    least = 0.5 ** (n - 1)  # all seeds on one side
    reach = f"so it can {'' if least <= LEVEL else 'never '}reach {LEVEL_TEXT}"
    needs = (
        f"a mean difference of at least {per_deviation(n):.1f} standard deviations of the "
        "differences"
    )
    if others > 1:
        needs += (
            f"; of {others} comparisons, the clearest one needs "
            f"{per_deviation(n, LEVEL / others):.1f} for Holm"
        )
    text = (
        f"With {n} seeds a paired t test needs {needs}. The smallest p of the sign test is "
        f"{least:.2g}, {reach}."
    )
    if others < 1:
        return [text]
    level = (
        "About one of 20 intervals at 95 % misses the true difference by chance. So the words "
        "better and worse go by "
        f"Holm's adjustment for {others} comparison{'s' if others > 1 else ''}"
    )
    chosen = " The best mean was chosen by the same numbers, so the gaps to it look too large."
    return [text, f"{level}.{chosen if _best(scenario) else ''}"]
