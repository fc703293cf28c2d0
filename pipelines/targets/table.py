"""Kind `table`: the paper's table as it lays it out, measured beside reported, and what that says.

Keys: `rows` and `columns` map the paper's titles to parts of an address {study, scenario, recipe, statistic}; the parts
of a row and of a column make a cell's, and `at` in a row ({column: parts}) has its own there. `methods` (rows or
columns): along which axis methods are compared. `statistic`: that of cells without one of their own. `scale` and
`decimals`: from shares to the paper's unit. `better`: higher, lower, none. `claim`: the method that the paper says is
best; what is composed with it ("B + A") is no rival. `gains`: rows or columns beside which the difference to another
one is shown, seed by seed: {title: title of the other}. A row or column may have `statistic`, `scale`, `decimals` and
`better` of its own, `reported`: the title under which the paper's number stands if it is another, and `compared:
false`: a method that the words leave out.

A method with a diverged seed has no mean over all its seeds. Its cell shows the mean of the seeds that ended and how
many did not; in our ranking it is last, tied with all others that have one, and no sentence compares its mean or its
gain. What has seen the test set (the tag `leak` of its runs) is marked and not ranked.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from scipy.stats import kendalltau

from pipelines.summary import Spread
from pipelines.targets.marks import some_diverge
from pipelines.targets.measured import Measured
from pipelines.targets.spec import Built, Target, address
from plugins.data.checks import known

NOT_YET, NO_DATA = "not run yet", "no data"
ENOUGH = 3  # methods, below which a rank correlation says nothing


@dataclass(frozen=True)
class Cell:
    """One number of the table, in the paper's unit."""

    measured: Spread | None
    reported: float | None
    reported_spread: float | None
    decimals: int = 2
    instead: str = ""  # why there is no measured number
    mark: str = ""  # what a reader has to know of it
    leaks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    diverged: int = 0  # seeds

    @property
    def mean(self) -> float | None:
        """What sentences compare: none where training has seen the test set or a seed has diverged."""
        return None if self.measured is None or self.leaks or self.diverged else self.measured.mean


class Gain(NamedTuple):
    """How much more than another cell a cell has, in the paper's unit."""

    measured: Spread | None
    reported: float | None


Place = tuple[str, str]  # row, column


def build(target: Target, measured: Measured) -> Built:
    """The table; cells that are not run yet, or not at this size, are said so."""
    spec = target.spec
    rows, columns = dict(spec["rows"]), dict(spec["columns"])
    at = {(r, c): address(target.id, c, rows[r], columns[c]) for r in rows for c in columns}
    cells = {place: _cell(target, measured, *place, of) for place, of in at.items()}
    gains = _gains(target, measured, at, cells)
    missing = tuple(f"{r}, {c}" for (r, c), cell in cells.items() if cell.instead in (NOT_YET, NO_DATA))
    ranks = _taus(target, cells)
    words = _words(target, cells, ranks)
    files = {"csv": _csv(cells, gains)}
    said = (*_words_on_gains(target, cells, gains), *words)
    return Built(_lines(target, cells, gains), files, said, missing, tuple(tau for tau, _ in ranks.values()))


def _cell(target: Target, measured: Measured, row: str, column: str, at: Mapping[str, Any]) -> Cell:
    in_paper = *_reported(target, row, column), int(at.get("decimals", target.spec.get("decimals", 2)))
    if "study" not in at:  # a row or column that the paper has and that can't be run
        return Cell(None, *in_paper, "-")
    if not measured.is_wanted(at):
        return Cell(None, *in_paper, "not run at this size")
    found, group = measured.value(at, _statistic(target, at)), measured.group(at)
    instead = ""
    if found is None:
        instead = NO_DATA if measured.skipped(at["study"]) else NOT_YET
        instead = some_diverge(len(group.diverged), len(group.runs)) or instead
    return Cell(
        None if found is None else _scaled(target, at, found), *in_paper, instead,
        "" if found is None else measured.mark(at), group.leaks, tuple(note for notes in group.notes for note in notes),
        len(group.diverged),
    )  # fmt: skip


def _statistic(target: Target, at: Mapping[str, Any]) -> str:
    return str(at.get("statistic", target.spec.get("statistic", "final")))


def _scaled(target: Target, at: Mapping[str, Any], found: Spread) -> Spread:
    """In the paper's unit."""
    scale = float(at.get("scale", target.spec.get("scale", 1)))
    return Spread(scale * found.mean, None if found.std is None else scale * found.std, found.n)


def _gains(
    target: Target, measured: Measured, at: Mapping[Place, Mapping[str, Any]], cells: Mapping[Place, Cell]
) -> dict[Place, Gain]:
    """The gain of each cell in a row or column of `gains`. The paper's is what it prints, or else the difference."""
    bases: Mapping[str, str] = target.spec.get("gains", {})
    for title in (*bases, *bases.values()):
        known(f"{target.id}: gains: row or column", title, (*target.spec["rows"], *target.spec["columns"]))
    found = {}
    for (row, column), cell in cells.items():
        base = (bases.get(row, row), bases.get(column, column))
        if base == (row, column):
            continue
        gain = None
        if cell.measured is not None and cells[base].measured is not None:
            gain = measured.gain(at[row, column], at[base], _statistic(target, at[row, column]))
        printed = (target.reported or {}).get("gains", {}).get(row)
        reported = None if printed is None else printed[list((target.reported or {})["columns"]).index(column)]
        if reported is None and cell.reported is not None:
            other = cells[base].reported
            reported = None if other is None else cell.reported - other
        found[row, column] = Gain(None if gain is None else _scaled(target, at[row, column], gain), reported)
    return found


def _reported(target: Target, row: str, column: str) -> tuple[float | None, float | None]:
    """The paper's number and the spread beside it."""
    row, column = (
        str(target.spec[axis][title].get("reported", title)) for axis, title in (("rows", row), ("columns", column))
    )
    if target.reported is None or row not in target.reported["rows"] or column not in target.reported["columns"]:
        return None, None
    value = target.reported["rows"][row][list(target.reported["columns"]).index(column)]
    if isinstance(value, list):
        return float(value[0]), None if value[1] is None else float(value[1])
    return (float(value), None) if isinstance(value, int | float) else (None, None)


def _lines(target: Target, cells: Mapping[Place, Cell], gains: Mapping[Place, Gain]) -> list[list[str]]:
    rows, columns = list(target.spec["rows"]), list(target.spec["columns"])
    return [["", *columns], *([row, *(_text(cells[row, c], gains.get((row, c))) for c in columns)] for row in rows)]


def _text(cell: Cell, gain: Gain | None) -> str:
    """`98.02 ± 0.03 (97.88)`: measured over seeds, in brackets what the paper reports; so is the gain, a line below.

    Marks stand between the two: `98.02 LEAK [1]; 1 of 3 seeds diverges (97.88)`.
    """
    found = (cell.instead if cell.measured is None else _number(cell.measured, cell.decimals)) + cell.mark
    if cell.reported is not None:
        found += f" ({cell.reported:g})"
    if gain is None or gain.measured is None:
        return found
    reported = "" if gain.reported is None else f" ({gain.reported:+.{cell.decimals}f})"
    return f"{found}\ngain {_number(gain.measured, cell.decimals, '+')}{reported}"


def _number(value: Spread, decimals: int, sign: str = "") -> str:
    spread = "" if value.std is None else f" ± {value.std:.{decimals}f}"
    return f"{value.mean:{sign}.{decimals}f}{spread}"


def _csv(cells: Mapping[Place, Cell], gains: Mapping[Place, Gain]) -> bytes:
    header = ["row", "column", "measured", "measured_std", "seeds", "diverged", "reported", "reported_spread"]
    header += ["difference", "leak", "notes"]
    lines = []
    for (row, column), cell in cells.items():
        mean, std, n = cell.measured or (None, None, 0)
        difference = None if mean is None or cell.reported is None else mean - cell.reported
        line: list[object] = [row, column, mean, std, n, cell.diverged, cell.reported, cell.reported_spread, difference]
        line += ["; ".join(cell.leaks), "; ".join(cell.notes)]
        if gains:
            gain = gains.get((row, column), Gain(None, None))
            line += [*(gain.measured or (None, None))[:2], gain.reported]
        lines.append(["" if x is None else x for x in line])
    return as_csv([*header, *(["gain", "gain_std", "gain_reported"] if gains else [])], lines)


def as_csv(header: Sequence[str], lines: Iterable[Sequence[object]]) -> bytes:
    """A CSV file; of fractions ten digits, which leaves out what scaling to another unit adds."""
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(header)
    table.writerows([float(f"{x:.10g}") if isinstance(x, float) else x for x in line] for line in lines)
    return text.getvalue().encode()


class Line(NamedTuple):
    """The methods of one setting, which are compared with each other."""

    better: str  # higher, lower
    cells: Mapping[str, Cell]  # by method


def _by_setting(target: Target, cells: Mapping[Place, Cell]) -> dict[str, Line]:
    """Each column (or row, where the methods are columns) that ranks its methods, and those that are compared."""
    by_rows = target.spec.get("methods", "rows") == "rows"
    methods, settings = (target.spec[key] for key in (("rows", "columns") if by_rows else ("columns", "rows")))
    compared = [method for method, about in methods.items() if about.get("compared", True)]
    better = {name: str(own.get("better", target.spec.get("better", "higher"))) for name, own in settings.items()}
    return {
        name: Line(better[name], {m: cells[(m, name) if by_rows else (name, m)] for m in compared})
        for name in settings
        if better[name] != "none"
    }


def _taus(target: Target, cells: Mapping[Place, Cell]) -> dict[str, tuple[float, int]]:
    """Kendall's τ between our ranking and the paper's, and over how many methods, for each setting that has one.

    Methods with a diverged seed tie for the last place of our ranking.
    """
    found = {}
    for setting, line in _by_setting(target, cells).items():
        last = math.inf if line.better == "lower" else -math.inf
        ours = {m: last if _is_last(cell) else cell.mean for m, cell in line.cells.items()}
        reported = {m: cell.reported for m, cell in line.cells.items()}
        pairs = [(ours[m], reported[m]) for m in ours if ours[m] is not None and reported[m] is not None]
        if len(pairs) >= ENOUGH:
            tau = float(kendalltau(*zip(*pairs, strict=True)).statistic)
            if math.isfinite(tau):
                found[setting] = tau, len(pairs)
    return found


def _is_last(cell: Cell) -> bool:
    """Whether it ranks behind all methods whose seeds all ended."""
    return bool(cell.diverged) and not cell.leaks


def _words(target: Target, cells: Mapping[Place, Cell], ranks: Mapping[str, tuple[float, int]]) -> list[str]:
    """For each column (or row): agreement of the ranking, and how the claimed method fares beyond the spread."""
    claim = str(target.spec.get("claim"))
    found = []
    for setting, line in _by_setting(target, cells).items():
        values = {m: cell.measured for m, cell in line.cells.items() if cell.measured and cell.mean is not None}
        parts = []
        if setting in ranks:
            tau, n = ranks[setting]
            parts.append(f"the order of {n} methods agrees with the paper's to Kendall τ = {tau:.2f}")
        last = [m for m, cell in line.cells.items() if _is_last(cell)]
        if last:
            parts.append(f"ranked last, as a seed diverges or all do: {', '.join(last)}")
        rivals = {m: value for m, value in values.items() if claim not in (m, *map(str.strip, m.split("+")))}
        if claim in values and rivals:
            better = -1 if line.better == "lower" else 1
            parts.append(_claim(claim, values[claim], rivals, better, line.cells[claim].decimals))
        if parts:
            found.append(f"{setting}: {'; '.join(parts)}.")
    return found


def _words_on_gains(target: Target, cells: Mapping[Place, Cell], gains: Mapping[Place, Gain]) -> list[str]:
    """For each row or column of `gains`: the mean over methods, ours and the paper's, and which ones are certain."""
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
        text = f"{title}{leaks} against {base}: the mean gain of {len(ours)} methods is {mean:+.{decimals}f}{beside}"
        certain = [gain for gain in ours if gain.std is not None]
        if len(certain) < len(ours):
            found.append(f"{text}, on one seed: no evidence either way.")
            continue
        beyond = [gain.mean for gain in certain if gain.std is not None and abs(gain.mean) > gain.std]
        up = sum(mean > 0 for mean in beyond)
        found.append(
            f"{text}; beyond its spread over seeds it is above 0 for {up} and below 0 for {len(beyond) - up} of them."
        )
    return found


def _claim(claim: str, own: Spread, others: Mapping[str, Spread], sign: int, decimals: int) -> str:
    """How the method that the paper puts first fares against the best of the others."""
    rival = max(others, key=lambda m: sign * others[m].mean)
    difference = own.mean - others[rival].mean
    spreads = [value.std for value in (own, others[rival]) if value.std is not None]
    how = f"{claim} is {abs(difference):.{decimals}f} {'above' if difference > 0 else 'below'} the best other ({rival})"
    if difference == 0:
        how = f"{claim} is as good as the best other ({rival})"
    if not spreads:
        return f"{how}, on one seed: no evidence either way"
    if abs(difference) <= max(spreads):
        return f"{how}, which is within the spread over seeds ({max(spreads):.{decimals}f}): not told apart"
    return f"{how}, more than the spread over seeds ({max(spreads):.{decimals}f})"
