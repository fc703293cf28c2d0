"""The report's table and sentences: numbers in, text out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipelines.reporting.summary import BASELINE, PUBLIC_MARKS, Line, Scenario, Spread, spread
from pipelines.reporting.text import as_csv

MIB = 2**20
NONE = "-"
COLUMNS_NOTE = (
    "Test accuracy of the global model: after the last round, mean of the last five rounds, best of any round. Worst "
    "client: the lowest accuracy of any client, with test samples weighted by the client's share of each class. MiB: "
    "all clients of a round, up and down."
)
NOISY_NOTE = "Noisy test: on one copy of the test set per client, each copy with that client's noise."
PUBLIC_NOTES = {
    "labelled": "trains on a small public labelled split (kept out of all clients' data) that the other methods do not "
    "see.",
    "unlabelled": "sees the samples of the public split without their labels, which the other methods do not.",
}
# Column of summary.csv: the number of a line.
SPREADS = {
    "final": "final", "last_5_rounds": "last", "best": "best", "vs_baseline": "difference", "worst_client": "worst",
    "noisy_test": "noisy", "traffic_round_bytes": "traffic_round", "traffic_total_bytes": "traffic_total",
}  # fmt: skip


def cells(scenario: Scenario) -> list[list[str]]:
    """The table as text, the header and then the best method first: accuracies in %, differences in points."""
    rows = [_row(scenario, line) for line in scenario.lines]
    return [list(rows[0]), *(list(row.values()) for row in rows)]


def plain(scenario: Scenario) -> str:
    """The table for a terminal."""
    table = cells(scenario)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table.insert(1, ["-" * width for width in widths])
    rows = ([cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in table)
    names = (row[0].ljust(widths[0]) for row in table)
    return "".join("  ".join([name, *row[1:]]) + "\n" for name, row in zip(names, rows, strict=True))


def summary_csv(scenarios: Iterable[Scenario]) -> bytes:
    """Every number of the tables, unrounded: accuracies as fractions, traffic in bytes; empty where unknown."""
    titles = [f"{column}_{part}" for column in SPREADS for part in ("mean", "std", "seeds")]
    lines = [
        [
            scenario.name, line.recipe, line.composition, line.rank, str(line.close).lower(), line.rounds,
            scenario.baseline.recipe if scenario.baseline else "",
            *(part for name in SPREADS.values() for part in getattr(line, name) or (None, None, 0)),
        ]
        for scenario in scenarios
        for line in scenario.lines
    ]  # fmt: skip
    header = ("scenario", "recipe", "composition", "rank", "close_to_next", "rounds", "baseline", *titles)
    return as_csv(header, lines, digits=None)


def headline(scenarios: Sequence[Scenario]) -> Mapping[str, Any]:
    """The metrics that DVC shows, by scenario and recipe; without the scenario if there is only one."""
    found = {scenario.name: {line.recipe: _headline(line) for line in scenario.lines} for scenario in scenarios}
    return next(iter(found.values())) if len(found) == 1 else found


def _headline(line: Line) -> dict[str, float]:
    """Accuracy, its spread and the worst client in %, traffic in MiB; unknown numbers are left out."""
    numbers = {
        "accuracy": 100 * line.final.mean,
        "spread": None if line.final.std is None else 100 * line.final.std,
        "worst_client": None if line.worst is None else 100 * line.worst.mean,
        "mib": line.traffic_total.mean / MIB,
    }
    return {name: round(number, 4) for name, number in numbers.items() if number is not None}


def curves_csv(scenario: Scenario, recipes: Sequence[str]) -> bytes:
    """Test accuracy of each recipe, mean over seeds, by round, for `dvc plots`. Empty where it is not known."""
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
    found = [COLUMNS_NOTE] + (["± is the sample standard deviation over seeds."] if _seeds(scenario) > 1 else [])
    if _noisy(scenario):
        found.append(NOISY_NOTE)
    if scenario.baseline is not None:
        found.append(
            f"vs {scenario.baseline.recipe}: difference in the last round, in percentage points, seed by seed. Both "
            "methods have the same partition, the same clients in each round and the same first weights."
        )
    if any(line.close for line in scenario.lines):
        found.append("≈ ahead of the next method by less than the spread over seeds: their order may be chance.")
    for public, mark in PUBLIC_MARKS.items():
        if any(line.public == public and not line.leak for line in scenario.lines):
            found.append(f"{mark} {PUBLIC_NOTES[public]}")
    found += [
        f"{line.recipe}: is not federated. It is a bound on what the others can reach, so it has no rank."
        for line in scenario.lines
        if not line.federated
    ]
    found += [f"LEAK: {line.recipe}: {line.leak}; its accuracy says nothing." for line in scenario.lines if line.leak]
    other = [f"{line.recipe} = {line.composition}" for line in scenario.lines if line.recipe != line.composition]
    if other:
        found.append(f"Named variants: {', '.join(other)} with other settings.")
    if len({line.seeds for line in scenario.lines}) > 1:
        found.append("The methods have different numbers of seeds (last column): compare their means with care.")
    if scenario.missing:
        found.append(f"Not finished, so not in the table: {', '.join(scenario.missing)}.")
    return found


def words(scenario: Scenario) -> list[str]:
    """Sentences on the numbers. They claim no more than the spread over seeds allows."""
    return [_leader(scenario), *_against_baseline(scenario), *_traffic(scenario), *_caution(scenario)]


def _row(scenario: Scenario, line: Line) -> dict[str, str]:
    """A method's cells by the title of their column. The noisy test has a column only where clients have noise."""
    base = scenario.baseline
    return {
        "method": line.label,
        "last round, %": _percent(line.final),
        "last 5, %": _percent(line.last),
        "best, %": _percent(line.best),
        "rank": f"{line.rank}{' ≈' if line.close else ''}" if line.compared else NONE,
        f"vs {base.recipe if base else BASELINE}": NONE if line is base else _percent(line.difference, sign="+"),
        "worst client, %": _percent(line.worst),
        **({"noisy test, %": _percent(line.noisy)} if _noisy(scenario) else {}),
        "MiB/round": _scaled(line.traffic_round),
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


def _leader(scenario: Scenario) -> str:
    compared = [line for line in scenario.lines if line.compared]
    if not compared:
        return "No method here can be compared."
    first, *others = compared
    text = f"After the last round {first.recipe} has the highest mean test accuracy, {_percent(first.final)} %"
    if not others:
        return text + "; it is the only method here."
    lead = 100 * (first.final.mean - others[0].final.mean)
    text += f", {lead:.2f} percentage points ahead of {others[0].recipe}"
    if first.final.std is None or others[0].final.std is None:
        return text + "; one seed can't show whether that is more than chance."
    if first.close:
        return text + ": less than the spread over seeds, so this may be chance."
    return text + ": more than the spread over seeds."


def _against_baseline(scenario: Scenario) -> list[str]:
    if scenario.baseline is None:
        return ["There are no results of plain FedAvg here to compare with."]
    base = scenario.baseline.recipe
    others = [line for line in scenario.lines if line is not scenario.baseline and line.compared]
    clear = [line for line in others if line.beyond_spread]
    better = [line for line in clear if line.difference is not None and line.difference.mean > 0]
    worse = [line for line in clear if line not in better]
    groups = (
        (f"Better than {base} by more than the spread of the difference over seeds", better),
        (f"Worse than {base} by more than that spread", worse),
        (f"No clear difference to {base} on these seeds", [line for line in others if line.beyond_spread is False]),
        (
            f"Difference to {base} on one seed, spread unknown",
            [line for line in others if line.difference is not None and line.difference.std is None],
        ),
        (f"No seed in common with {base}", [line for line in others if line.difference is None]),
    )
    return [f"{title}: {', '.join(_named(line) for line in lines)}." for title, lines in groups if lines]


def _named(line: Line) -> str:
    if line.difference is None:
        return line.recipe
    count = f", higher on {line.wins} of {line.difference.n} seeds" if line.difference.n > 1 else ""
    return f"{line.recipe} ({_percent(line.difference, sign='+')}{count})"


def _traffic(scenario: Scenario) -> list[str]:
    """The methods whose traffic differs from the baseline's by at least 5 %."""
    if scenario.baseline is None or scenario.baseline.traffic_round.mean == 0:
        return []
    base = scenario.baseline.traffic_round
    known = [(line.recipe, line.traffic_round.mean / base.mean) for line in scenario.lines if line.federated]
    other = [f"{recipe} {ratio:.2g} times" for recipe, ratio in known if abs(ratio - 1) >= 0.05]
    text = f"Traffic: {scenario.baseline.recipe} moves {_scaled(base)} MiB per round"
    return [f"{text}; {', '.join(other)} as much." if other else f"{text}, and so do the others."]


def _caution(scenario: Scenario) -> list[str]:
    if _seeds(scenario) == 1:
        return ["There is only one seed, so no spread is known and every difference may be chance. Add seeds."]
    return [f"The spread comes from at most {_seeds(scenario)} seeds. It is no test of significance."]
