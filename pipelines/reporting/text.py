"""Tables as text: lines of cells into Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

NONE = "-"  # the cell of an unknown number


def markdown(table: Sequence[Sequence[str]]) -> str:
    """A table with its header first.

    The first column stands on the left; a cell may have several lines.
    """
    header, *rows = table
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |".replace("\n", "<br>") for line in lines)


def plain(table: Sequence[Sequence[str]]) -> str:
    """A table for a terminal."""
    table = list(table)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    table.insert(1, ["-" * width for width in widths])
    rows = ([cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in table)
    names = (row[0].ljust(widths[0]) for row in table)
    return "".join(
        "  ".join([name, *row[1:]]) + "\n" for name, row in zip(names, rows, strict=True)
    )


def as_csv(
    header: Sequence[str], lines: Iterable[Sequence[object]], digits: int | None = 10
) -> bytes:
    """A CSV file; None and NaN are empty.

    `digits`: of fractions; ten drop what scaling adds, None keeps all.
    """
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(header)
    table.writerows([_cell(x, digits) for x in line] for line in lines)
    return text.getvalue().encode()


def _cell(value: object, digits: int | None) -> object:
    if value is None or value != value:  # NaN is unequal to itself
        return ""
    return float(f"{value:.{digits}g}") if digits and isinstance(value, float) else value
