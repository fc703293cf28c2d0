"""Kind `table`: the paper's table as it lays it out, measured beside reported, and what that says.

Keys: `rows` and `columns` map the paper's titles to parts of an address {study, scenario, recipe, statistic}; the parts
of a row and of a column make a cell's, and `at` in a row ({column: parts}) has its own there. `methods` (rows or
columns): along which axis methods are compared. `statistic`: that of cells without one of their own. `scale` and
`decimals`: from shares to the paper's unit. `better`: higher, lower, none. `claim`: the method that the paper says is
best.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scipy.stats import kendalltau

from pipelines.summary import Spread
from pipelines.targets.measured import Measured
from pipelines.targets.spec import Built, Target, address

NOT_YET, NO_DATA = "not run yet", "no data"
ENOUGH = 3  # methods, below which a rank correlation says nothing


@dataclass(frozen=True)
class Cell:
    """One number of the table, in the paper's unit."""

    measured: Spread | None
    reported: float | None
    reported_spread: float | None
    instead: str = ""  # why there is no measured number


def build(target: Target, measured: Measured) -> Built:
    """The table; cells that are not run yet, or not at this size, are said so."""
    spec = target.spec
    rows, columns = dict(spec["rows"]), dict(spec["columns"])
    cells = {(r, c): _cell(target, measured, r, c, address(c, rows[r], columns[c])) for r in rows for c in columns}
    missing = tuple(f"{r}, {c}" for (r, c), cell in cells.items() if cell.instead in (NOT_YET, NO_DATA))
    words = _words(target, cells) if spec.get("better", "higher") != "none" else ()
    return Built(_lines(target, cells), {"csv": _csv(target, cells).encode()}, tuple(words), missing)


def _cell(target: Target, measured: Measured, row: str, column: str, at: Mapping[str, Any]) -> Cell:
    spec = target.spec
    scale = float(at.get("scale", spec.get("scale", 1)))
    statistic = str(at.get("statistic", spec.get("statistic", "final")))
    reported, reported_spread = _reported(target, row, column)
    if "study" not in at:  # a row or column that the paper has and that can't be run
        return Cell(None, reported, reported_spread, "-")
    if not measured.is_wanted(at):
        return Cell(None, reported, reported_spread, "not run at this size")
    found = measured.value(at, statistic)
    if measured.diverged(at):
        return Cell(None, reported, reported_spread, "diverges")
    if found is None:
        return Cell(None, reported, reported_spread, NO_DATA if measured.skipped(at["study"]) else NOT_YET)
    found = Spread(scale * found.mean, None if found.std is None else scale * found.std, found.n)
    return Cell(found, reported, reported_spread)


def _reported(target: Target, row: str, column: str) -> tuple[float | None, float | None]:
    """The paper's number and the spread beside it."""
    if target.reported is None or row not in target.reported["rows"] or column not in target.reported["columns"]:
        return None, None
    value = target.reported["rows"][row][list(target.reported["columns"]).index(column)]
    if isinstance(value, list):
        return float(value[0]), None if value[1] is None else float(value[1])
    return (float(value), None) if isinstance(value, int | float) else (None, None)


def _lines(target: Target, cells: Mapping[tuple[str, str], Cell]) -> list[list[str]]:
    decimals = int(target.spec.get("decimals", 2))
    rows, columns = list(target.spec["rows"]), list(target.spec["columns"])
    return [["", *columns], *([row, *(_text(cells[row, column], decimals) for column in columns)] for row in rows)]


def _text(cell: Cell, decimals: int) -> str:
    """`98.02 ± 0.03 (97.88)`: measured over seeds, in brackets what the paper reports."""
    if cell.measured is None:
        found = cell.instead
    elif cell.measured.std is None:
        found = f"{cell.measured.mean:.{decimals}f}"
    else:
        found = f"{cell.measured.mean:.{decimals}f} ± {cell.measured.std:.{decimals}f}"
    return found if cell.reported is None else f"{found} ({cell.reported:g})"


def _csv(target: Target, cells: Mapping[tuple[str, str], Cell]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(["row", "column", "measured", "measured_std", "seeds", "reported", "reported_spread", "difference"])
    for (row, column), cell in cells.items():
        mean, std, n = cell.measured or (None, None, 0)
        difference = None if mean is None or cell.reported is None else mean - cell.reported
        cells_of_line = (row, column, mean, std, n, cell.reported, cell.reported_spread, difference)
        table.writerow(["" if x is None else x for x in cells_of_line])
    return text.getvalue()


def _words(target: Target, cells: Mapping[tuple[str, str], Cell]) -> list[str]:
    """For each column (or row): agreement of the ranking, and how the claimed method fares beyond the spread."""
    spec = target.spec
    by_rows = spec.get("methods", "rows") == "rows"
    methods, settings = (list(spec[key]) for key in (("rows", "columns") if by_rows else ("columns", "rows")))
    sign = -1 if spec.get("better") == "lower" else 1
    found = []
    for setting in settings:
        line = {m: cells[(m, setting) if by_rows else (setting, m)] for m in methods}
        known = {m: cell.measured for m, cell in line.items() if cell.measured is not None}
        if len(known) < 2:
            continue
        parts = []
        both = [m for m in known if line[m].reported is not None]
        if len(both) >= ENOUGH:
            tau = kendalltau([known[m].mean for m in both], [line[m].reported for m in both]).statistic
            if math.isfinite(tau):
                parts.append(f"the order of {len(both)} methods agrees with the paper's to Kendall τ = {tau:.2f}")
        claim = str(spec.get("claim"))
        if claim in known:
            parts.append(_claim(claim, known, sign, int(spec.get("decimals", 2))))
        if parts:
            found.append(f"{setting}: {'; '.join(parts)}.")
    return found


def _claim(claim: str, known: Mapping[str, Spread], sign: int, decimals: int) -> str:
    """How the method that the paper puts first fares against the best of the others."""
    others = {m: value for m, value in known.items() if m != claim}
    rival = max(others, key=lambda m: sign * others[m].mean)
    difference = known[claim].mean - others[rival].mean
    spreads = [value.std for value in (known[claim], others[rival]) if value.std is not None]
    how = f"{claim} is {abs(difference):.{decimals}f} {'above' if difference > 0 else 'below'} the best other ({rival})"
    if difference == 0:
        how = f"{claim} is as good as the best other ({rival})"
    if not spreads:
        return f"{how}, on one seed: no evidence either way"
    if abs(difference) <= max(spreads):
        return f"{how}, which is within the spread over seeds ({max(spreads):.{decimals}f}): not told apart"
    return f"{how}, more than the spread over seeds ({max(spreads):.{decimals}f})"
