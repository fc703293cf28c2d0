"""Kind `table`: the paper's table in its own layout, our numbers beside the paper's, and sentences
on the outcome.

Keys:

`rows`, `columns`        the paper's title -> parts of an address {study, scenario, recipe,
                         statistic}; the parts of a row and of a column together are the address
                         of a cell; `at` in a row ({column: parts}) overrides parts of single cells
`methods`                `rows` or `columns`: the axis of the methods, which are compared
`statistic`              the statistic of cells without one of their own
`scale`, `decimals`      from fractions to the paper's unit
`better`                 higher, lower, none
`claim`                  the method that the paper says is best; a composition with it ("B + A")
                         is no rival
`gains`                  {title: title of another}: rows or columns that show their difference to
                         another, seed by seed
`differences`, `ratios`  {text: [method, other]}: sentences that compare two methods over all
                         settings
`same`                   {method: other}: counts the runs of two methods with equal weights

A row or column may have its own `statistic`, `scale`, `decimals` and `better`. `reported` is the
title of the paper's number if it differs. `compared: false` leaves a method out of the sentences.

A method with a diverged seed has no mean over all its seeds. Its cell shows the mean of the seeds
that ended and the number of seeds that did not. Our ranking puts such methods last, tied with each
other. No sentence compares their mean or gain. A run that has seen the test set (tag `leak`) is
marked and not ranked.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from scipy.stats import kendalltau

from fedml_noniid.pipelines.papers.targets.marks import some_diverge
from fedml_noniid.pipelines.papers.targets.measured import Measured
from fedml_noniid.pipelines.papers.targets.spec import NOT_HERE, Built, Target, address
from fedml_noniid.pipelines.papers.targets.words import against, confirmed, plus_minus, told
from fedml_noniid.pipelines.reporting.summary import Spread
from fedml_noniid.pipelines.reporting.text import as_csv
from fedml_noniid.plugins.data.checks import known

NOT_YET, NO_DATA, NOT_MEASURED = "not run yet", "no data", "not measured"
ENOUGH = 3  # methods; a rank correlation over fewer says nothing


@dataclass(frozen=True)
class Cell:
    """One number of the table, in the paper's unit."""

    measured: Spread | None
    reported: float | None
    reported_spread: float | None
    decimals: int = 2
    instead: str = ""  # the reason for a missing number
    mark: str = ""  # leaks, notes and diverged seeds
    leaks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    diverged: int = 0  # seeds

    @property
    def mean(self) -> float | None:
        """The mean that sentences compare.

        None if training has seen the test set or a seed diverged.
        """
        return None if self.measured is None or self.leaks or self.diverged else self.measured.mean


class Gain(NamedTuple):
    """The difference of a cell to another cell, in the paper's unit."""

    measured: Spread | None
    reported: float | None


Place = tuple[str, str]  # row, column


def build(target: Target, measured: Measured) -> Built:
    """The table. A cell without a number says why."""
    at = addresses(target)
    cells = {place: _cell(target, measured, *place, of) for place, of in at.items()}
    gains = _gains(target, measured, at, cells)
    missing = tuple(
        f"{r}, {c}" for (r, c), cell in cells.items() if cell.instead in (NOT_YET, NO_DATA)
    )
    ranks = _taus(target, cells)
    said = (
        *_words_on_gains(target, cells, gains),
        *_words(target, measured, at, cells, ranks),
        *_words_on_pairs(target, measured, at, cells),
    )
    taus = tuple(tau for tau, _ in ranks.values())
    return Built(_lines(target, cells, gains), {"csv": _csv(cells, gains)}, said, missing, taus)


def addresses(target: Target) -> dict[Place, dict[str, Any]]:
    """The address of each cell."""
    rows, columns = dict(target.spec["rows"]), dict(target.spec["columns"])
    return {(r, c): address(target.id, c, rows[r], columns[c]) for r in rows for c in columns}


def _cell(target: Target, measured: Measured, row: str, column: str, at: Mapping[str, Any]) -> Cell:
    in_paper = *_reported(target, row, column), int(_option(target, at, "decimals", 2))
    if "study" not in at:  # a row or column of the paper that can't be run
        return Cell(None, *in_paper, "-")
    if not measured.is_wanted(at):
        return Cell(None, *in_paper, NOT_HERE)
    found, group = _value(target, measured, at), measured.group(at)
    instead = ""
    if found is None:
        instead = some_diverge(len(group.diverged), len(group.runs))
        instead = instead or (
            NOT_MEASURED if group.runs else NO_DATA if measured.skipped(at["study"]) else NOT_YET
        )
    return Cell(
        found,
        *in_paper,
        instead,
        "" if found is None else measured.mark(at),
        group.leaks,
        tuple(note for notes in group.notes for note in notes),
        len(group.diverged),
    )


def _option(target: Target, at: Mapping[str, Any], key: str, default: Any) -> Any:
    """The value of `key` for a cell. The default is the value for the whole table."""
    return at.get(key, target.spec.get(key, default))


def _value(
    target: Target, measured: Measured, at: Mapping[str, Any], base: Mapping[str, Any] | None = None
) -> Spread | None:
    """A cell's statistic in the paper's unit, or the difference to that of `base`, seed by seed."""
    how = str(_option(target, at, "statistic", "final")), float(_option(target, at, "scale", 1))
    return measured.value(at, *how) if base is None else measured.gain(at, base, *how)


def _gains(
    target: Target,
    measured: Measured,
    at: Mapping[Place, Mapping[str, Any]],
    cells: Mapping[Place, Cell],
) -> dict[Place, Gain]:
    """The gain of each cell in a row or column of `gains`.

    The paper's gain is the printed one, else the difference.
    """
    bases: Mapping[str, str] = target.spec.get("gains", {})
    for title in (*bases, *bases.values()):
        known(
            f"{target.id}: gains: row or column",
            title,
            (*target.spec["rows"], *target.spec["columns"]),
        )
    found = {}
    for (row, column), cell in cells.items():
        base = (bases.get(row, row), bases.get(column, column))
        if base == (row, column):
            continue
        gain = None
        if cell.measured is not None and cells[base].measured is not None:
            gain = _value(target, measured, at[row, column], at[base])
        printed = (target.reported or {}).get("gains", {}).get(row)
        reported = (
            None
            if printed is None
            else printed[list((target.reported or {})["columns"]).index(column)]
        )
        if reported is None and cell.reported is not None:
            other = cells[base].reported
            reported = None if other is None else cell.reported - other
        found[row, column] = Gain(gain, reported)
    return found


def _reported(target: Target, row: str, column: str) -> tuple[float | None, float | None]:
    """The paper's number and the spread beside it."""
    row, column = (
        str(target.spec[axis][title].get("reported", title))
        for axis, title in (("rows", row), ("columns", column))
    )
    value = target.printed(row, column)
    if isinstance(value, list):
        return float(value[0]), None if value[1] is None else float(value[1])
    return (float(value), None) if isinstance(value, int | float) else (None, None)


def _lines(
    target: Target, cells: Mapping[Place, Cell], gains: Mapping[Place, Gain]
) -> list[list[str]]:
    rows, columns = list(target.spec["rows"]), list(target.spec["columns"])
    return [
        ["", *columns],
        *([row, *(_text(cells[row, c], gains.get((row, c))) for c in columns)] for row in rows),
    ]


def _text(cell: Cell, gain: Gain | None) -> str:
    """`98.02 ± 0.03 (97.88)`: our number over seeds, the paper's in brackets.

    The gain is on the next line.

    Marks stand between the two numbers: `98.02 LEAK [1]; 1 of 3 seeds diverges (97.88)`.
    """
    found = (
        cell.instead if cell.measured is None else plus_minus(cell.measured, cell.decimals)
    ) + cell.mark
    if cell.reported is not None:
        found += f" ({cell.reported:g})"
    if gain is None or gain.measured is None:
        return found
    reported = "" if gain.reported is None else f" ({gain.reported:+.{cell.decimals}f})"
    return f"{found}\ngain {plus_minus(gain.measured, cell.decimals, '+')}{reported}"


def _csv(cells: Mapping[Place, Cell], gains: Mapping[Place, Gain]) -> bytes:
    header = [
        "row",
        "column",
        "measured",
        "measured_std",
        "seeds",
        "diverged",
        "reported",
        "reported_spread",
    ]
    header += [
        "difference",
        "leak",
        "notes",
        *(["gain", "gain_std", "gain_reported"] if gains else []),
    ]
    lines = []
    for place, cell in cells.items():
        mean, std, n = cell.measured or (None, None, 0)
        difference = None if mean is None or cell.reported is None else mean - cell.reported
        line: list[object] = [
            *place,
            mean,
            std,
            n,
            cell.diverged,
            cell.reported,
            cell.reported_spread,
            difference,
        ]
        line += ["; ".join(cell.leaks), "; ".join(cell.notes)]
        if gains:
            gain = gains.get(place, Gain(None, None))
            line += [*(gain.measured or (None, None))[:2], gain.reported]
        lines.append(line)
    return as_csv(header, lines)


class Line(NamedTuple):
    """The methods of one setting. They are compared with each other."""

    better: str  # higher, lower
    cells: Mapping[str, Cell]  # by method


def _by_setting(target: Target, cells: Mapping[Place, Cell]) -> dict[str, Line]:
    """Each column (or row, if the methods are columns) that ranks its methods, with the compared
    methods."""
    by_rows = target.spec.get("methods", "rows") == "rows"
    methods, settings = (
        target.spec[key] for key in (("rows", "columns") if by_rows else ("columns", "rows"))
    )
    compared = [method for method, about in methods.items() if about.get("compared", True)]
    better = {
        name: str(own.get("better", target.spec.get("better", "higher")))
        for name, own in settings.items()
    }
    return {
        name: Line(better[name], {m: cells[(m, name) if by_rows else (name, m)] for m in compared})
        for name in settings
        if better[name] != "none"
    }


def _taus(target: Target, cells: Mapping[Place, Cell]) -> dict[str, tuple[float, int]]:
    """For each setting that has one: Kendall's τ between our ranking and the paper's, and the
    number of methods.

    Methods with a diverged seed tie for the last place of our ranking.
    """
    found = {}
    for setting, line in _by_setting(target, cells).items():
        last = math.inf if line.better == "lower" else -math.inf
        ours = {m: last if _is_last(cell) else cell.mean for m, cell in line.cells.items()}
        reported = {m: cell.reported for m, cell in line.cells.items()}
        pairs = [
            (ours[m], reported[m]) for m in ours if ours[m] is not None and reported[m] is not None
        ]
        if len(pairs) >= ENOUGH:
            tau = float(kendalltau(*zip(*pairs, strict=True)).statistic)
            if math.isfinite(tau):
                found[setting] = tau, len(pairs)
    return found


def _is_last(cell: Cell) -> bool:
    """Whether it has a diverged seed and no leak.

    It then ranks behind all methods without diverged seeds.
    """
    return bool(cell.diverged) and not cell.leaks


def _words(
    target: Target,
    measured: Measured,
    at: Mapping[Place, Mapping[str, Any]],
    cells: Mapping[Place, Cell],
    ranks: Mapping[str, tuple[float, int]],
) -> list[str]:
    """For each column (or row): the agreement of the rankings, and the claimed method against the
    others."""
    claim, by_rows = str(target.spec.get("claim")), target.spec.get("methods", "rows") == "rows"
    found = []
    for setting, line in _by_setting(target, cells).items():
        values = {
            m: cell.measured
            for m, cell in line.cells.items()
            if cell.measured and cell.mean is not None
        }
        parts = []
        if setting in ranks:
            tau, n = ranks[setting]
            parts.append(
                f"the order of {n} methods agrees with the paper's to Kendall τ = {tau:.2f}"
            )
        last = [m for m, cell in line.cells.items() if _is_last(cell)]
        if last:
            parts.append(f"ranked last, as a seed diverges or all do: {', '.join(last)}")
        rivals = {
            m: value
            for m, value in values.items()
            if claim not in (m, *map(str.strip, m.split("+")))
        }
        if claim in values and rivals:
            sign = -1 if line.better == "lower" else 1
            rival = max(rivals, key=lambda m: sign * rivals[m].mean)
            pair = ((m, setting) if by_rows else (setting, m) for m in (claim, rival))
            gain = _value(target, measured, *(at[place] for place in pair))
            best = f"the best other ({rival})"
            parts.append(
                f"{claim} and {best} have no seed in common"
                if gain is None
                else against(claim, best, gain, line.cells[claim].decimals)
            )
        if parts:
            found.append(f"{setting}: {'; '.join(parts)}.")
    return found


def _words_on_gains(
    target: Target, cells: Mapping[Place, Cell], gains: Mapping[Place, Gain]
) -> list[str]:
    """For each row or column of `gains`: our mean over methods, the paper's mean, and the gains
    that seeds confirm."""
    decimals = int(target.spec.get("decimals", 2))
    found = []
    for title, base in target.spec.get("gains", {}).items():
        places = [place for place in gains if title in place]
        own = [gains[place] for place in places if gains[place].measured is not None]
        leaks = " LEAK" if any(cells[place].leaks for place in places) else ""
        ours = [gain.measured for gain in own if gain.measured is not None]
        if not ours:
            continue
        reported = [gain.reported for gain in own if gain.reported is not None]
        beside = f" (in the paper {statistics.fmean(reported):+.{decimals}f})" if reported else ""
        mean = statistics.fmean(gain.mean for gain in ours)
        text = (
            f"{title}{leaks} against {base}: the mean gain of {len(ours)} methods is "
            f"{mean:+.{decimals}f}{beside}"
        )
        if any(gain.std is None for gain in ours):
            found.append(f"{text}, on one seed: no evidence either way.")
            continue
        up, down = confirmed(ours)
        found.append(
            f"{text}; paired t tests over seeds, with Holm's adjustment for {len(ours)}, find "
            f"it above 0 for {up} and "
            f"below 0 for {down} of them."
        )
    return found


def _words_on_pairs(
    target: Target,
    measured: Measured,
    at: Mapping[Place, Mapping[str, Any]],
    cells: Mapping[Place, Cell],
) -> list[str]:
    """A sentence for each of `differences`, `ratios` and `same`, over the settings that have both
    methods."""
    by_rows, spec = target.spec.get("methods", "rows") == "rows", target.spec

    def pairs(one: str, other: str) -> Iterator[tuple[str, Place, Place]]:
        for setting in spec["columns" if by_rows else "rows"]:
            pair = tuple(
                (title, setting) if by_rows else (setting, title) for title in (one, other)
            )
            if all(measured.is_wanted(at[place]) for place in pair):
                yield setting, *pair

    found = []
    for says, (one, other) in spec.get("differences", {}).items():
        gains = ((s, _value(target, measured, at[a], at[b])) for s, a, b in pairs(one, other))
        said = [
            f"{s} {told(gain, int(spec.get('decimals', 2)))}"
            for s, gain in gains
            if gain is not None
        ]
        found += [f"{says} ({one} less {other}): {'; '.join(said)}."] if said else []
    for says, (one, other) in spec.get("ratios", {}).items():
        means = ((s, cells[a].mean, cells[b].mean) for s, a, b in pairs(one, other))
        said = [f"{s} {a / b:.3g}" for s, a, b in means if a is not None and b]
        found += [f"{says} ({one} by {other}): {'; '.join(said)}."] if said else []
    for one, other in spec.get("same", {}).items():
        same: dict[tuple[object, ...], bool] = {}  # settings with the same runs count once
        for _, a, b in pairs(one, other):
            hashes = [
                {run.seed: run.tags["weights_sha256"] for run in measured.runs(at[place])}
                for place in (a, b)
            ]
            for seed in hashes[0].keys() & hashes[1].keys():
                same[at[a]["study"], at[a]["scenario"], seed] = hashes[0][seed] == hashes[1][seed]
        if same:
            found.append(
                f"{one}: the same final weights as {other}, to the bit, in {sum(same.values())} "
                f"of {len(same)} runs."
            )
    return found
