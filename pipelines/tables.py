"""The report's table and sentences: numbers in, text out."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence

from pipelines.summary import PUBLIC_MARKS, Line, Scenario, Spread, spread

MIB = 2**20
NONE = "-"
HEADER = (
    "method",
    "last round, %",
    "last 5, %",
    "best, %",
    "rank",
    "vs {baseline}",
    "worst client, %",
    "noisy test, %",
    "MiB/round",
    "MiB total",
    "s/round",
    "seeds",
)
COLUMNS_NOTE = (
    "Test accuracy of the global model: after the last round, mean of the last five rounds, best of any round. Worst "
    "client: the lowest accuracy of any client, with test samples weighted by the client's share of each class. MiB: "
    "all clients of a round, up and down. s/round: the median round."
)
NOISY = HEADER.index("noisy test, %")  # only where the clients have noise
NOISY_NOTE = "Noisy test: on as many copies of the test set as there are clients, each in one client's noise."
PUBLIC_NOTES = {
    "labelled": "trains on a small public labelled split (kept out of all clients' data) that the other methods do not "
    "see.",
    "unlabelled": "sees the samples of the public split without their labels, which the other methods do not.",
}


def header(scenario: Scenario) -> list[str]:
    """Titles of the columns."""
    titles = [title.format(baseline=scenario.baseline.recipe if scenario.baseline else "fedavg") for title in HEADER]
    return _fitting(scenario, titles)


def cells(scenario: Scenario) -> list[list[str]]:
    """The table as text, best method first: accuracies in percent, differences in percentage points."""
    return [_fitting(scenario, _cells(line, line is scenario.baseline)) for line in scenario.lines]


def plain(scenario: Scenario) -> str:
    """The table for a terminal."""
    table = [header(scenario), *cells(scenario)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    rows = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in table
    ]
    return "\n".join([rows[0], "  ".join("-" * width for width in widths), *rows[1:]]) + "\n"


def markdown(scenario: Scenario) -> str:
    """The table for report.md."""
    titles = header(scenario)
    rows = [titles, ["---"] + ["---:"] * (len(titles) - 1), *cells(scenario)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def summary_csv(scenarios: Iterable[Scenario]) -> str:
    """Every number of the tables, unrounded: accuracies as shares, traffic in bytes; empty where unknown."""
    file = io.StringIO()
    spreads = ("final", "last", "best", "difference", "worst", "noisy", "traffic_round", "traffic_total", "seconds")
    names = {"last": "last_5_rounds", "difference": "vs_baseline", "worst": "worst_client", "noisy": "noisy_test"}
    units = {"traffic_round": "_bytes", "traffic_total": "_bytes"}
    columns = [names.get(name, name) + units.get(name, "") for name in spreads]
    out = csv.writer(file, lineterminator="\n")
    titles = [f"{column}_{part}" for column in columns for part in ("mean", "std", "seeds")]
    out.writerow(["scenario", "recipe", "composition", "rank", "close_to_next", "rounds", "baseline", *titles])
    for scenario in scenarios:
        for line in scenario.lines:
            values = [part for name in spreads for part in _parts(getattr(line, name))]
            baseline = scenario.baseline.recipe if scenario.baseline else ""
            about = [scenario.name, line.recipe, line.composition, line.rank, str(line.close).lower(), line.rounds]
            out.writerow([*about, baseline, *values])
    return file.getvalue()


def curves_csv(scenario: Scenario, recipes: Sequence[str]) -> str:
    """Test accuracy of each recipe, mean over seeds, by round: what `dvc plots` draws. Empty where nothing is known."""
    measured: dict[tuple[float, str], list[float]] = {}
    for result in scenario.results:
        for row in result.rows:
            measured.setdefault((row["round"], result.recipe), []).append(row["test_accuracy"])
    file = io.StringIO()
    out = csv.writer(file, lineterminator="\n")
    out.writerow(["round", *recipes])
    for t in sorted({t for t, _ in measured}):
        found = (spread(filter(math.isfinite, measured.get((t, recipe), []))) for recipe in recipes)
        out.writerow([int(t), *("" if known is None else known.mean for known in found)])
    return file.getvalue()


def notes(scenario: Scenario) -> list[str]:
    """Footnotes of the table: what its marks mean and what it lacks."""
    found = [COLUMNS_NOTE] + (["± is the sample standard deviation over seeds."] if _seeds(scenario) > 1 else [])
    if _noisy(scenario):
        found.append(NOISY_NOTE)
    if scenario.baseline is not None:
        found.append(
            f"vs {scenario.baseline.recipe}: difference in the last round, in percentage points, seed by seed: both "
            "methods meet the same partition, the same clients in each round and the same first weights."
        )
    if any(line.close for line in scenario.lines):
        found.append("≈ ahead of the next method by less than the spread over seeds: their order may be chance.")
    for public, mark in PUBLIC_MARKS.items():
        if any(line.public == public and not line.leak for line in scenario.lines):
            found.append(f"{mark} {PUBLIC_NOTES[public]}")
    found += [
        f"{line.recipe}: no federated learning but a bound, so it has no rank."
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
    """What the numbers say, in sentences. Never more than the spread over seeds allows."""
    return [_leader(scenario), *_against_baseline(scenario), *_traffic(scenario), *_caution(scenario)]


def _cells(line: Line, is_baseline: bool) -> list[str]:
    return [
        line.label,
        _percent(line.final),
        _percent(line.last),
        _percent(line.best),
        f"{line.rank}{' ≈' if line.close else ''}" if line.compared else NONE,
        NONE if is_baseline else _percent(line.difference, sign="+"),
        _percent(line.worst),
        _percent(line.noisy),
        _scaled(line.traffic_round),
        _scaled(line.traffic_total),
        NONE if line.seconds is None else f"{line.seconds.mean:.3f}",
        str(len(line.seeds)),
    ]


def _fitting(scenario: Scenario, row: list[str]) -> list[str]:
    """A row of the table, without the column of a noisy test where there is none."""
    return row if _noisy(scenario) else row[:NOISY] + row[NOISY + 1 :]


def _noisy(scenario: Scenario) -> bool:
    return any(line.noisy for line in scenario.lines)


def _percent(value: Spread | None, sign: str = "") -> str:
    if value is None:
        return NONE
    mean = f"{100 * value.mean:{sign}.2f}"
    return mean if value.std is None else f"{mean} ± {100 * value.std:.2f}"


def _scaled(value: Spread | None) -> str:
    """MiB with three significant digits, never in exponent form."""
    if value is None:
        return NONE
    mib = value.mean / MIB
    return f"{mib:#.3g}".rstrip(".") if mib < 1000 else f"{mib:.0f}"


def _parts(value: Spread | None) -> list[object]:
    return ["", "", 0] if value is None else [value.mean, "" if value.std is None else value.std, value.n]


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
        return text + "; with one seed nobody can say whether that is more than chance."
    if first.close:
        return text + ": less than the spread over seeds, so this may be chance."
    return text + ": more than the spread over seeds."


def _against_baseline(scenario: Scenario) -> list[str]:
    if scenario.baseline is None:
        return ["There are no results of plain FedAvg here to compare with."]
    base, others = (
        scenario.baseline.recipe,
        [line for line in scenario.lines if line is not scenario.baseline and line.compared],
    )
    clear = [line for line in others if line.beyond_spread]
    better = [line for line in clear if line.difference is not None and line.difference.mean > 0]
    worse = [line for line in clear if line not in better]
    groups = (
        (f"Better than {base} by more than the spread of the difference over seeds", better),
        (f"Worse than {base} by more than that spread", worse),
        (f"Not told apart from {base} by these seeds", [line for line in others if line.beyond_spread is False]),
        (f"Difference to {base} on one seed, spread unknown", [line for line in others if _one_seed(line)]),
        (f"No seed in common with {base}", [line for line in others if line.difference is None]),
    )
    return [f"{title}: {', '.join(_named(line) for line in lines)}." for title, lines in groups if lines]


def _one_seed(line: Line) -> bool:
    return line.difference is not None and line.difference.std is None


def _named(line: Line) -> str:
    if line.difference is None:
        return line.recipe
    count = f", higher on {line.wins} of {line.difference.n} seeds" if line.difference.n > 1 else ""
    return f"{line.recipe} ({_percent(line.difference, sign='+')}{count})"


def _traffic(scenario: Scenario) -> list[str]:
    """Who moves more or less than the baseline, by at least a twentieth."""
    base = scenario.baseline.traffic_round if scenario.baseline else None
    if scenario.baseline is None or base is None or base.mean == 0:
        return []
    known = [
        (line.recipe, line.traffic_round.mean / base.mean)
        for line in scenario.lines
        if line.traffic_round and line.federated
    ]
    other = [f"{recipe} {ratio:.2g} times" for recipe, ratio in known if abs(ratio - 1) >= 0.05]
    text = f"Traffic: {scenario.baseline.recipe} moves {_scaled(base)} MiB per round"
    return [f"{text}; {', '.join(other)} as much." if other else f"{text}, and so do the others."]


def _caution(scenario: Scenario) -> list[str]:
    if _seeds(scenario) == 1:
        return ["There is one seed only, so no spread is known and no difference can be told from chance: add seeds."]
    return [
        f"The spread comes from {_seeds(scenario)} seeds at most; this is a description, not a test of significance."
    ]
