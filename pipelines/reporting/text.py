"""Numbers and tables as text: cells of Markdown, CSV and the terminal."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from fedml_noniid.core.errors import one_line
from fedml_noniid.metrics import Metric

if TYPE_CHECKING:
    from fedml_noniid.pipelines.reporting.summary import Spread

NONE = "-"  # the cell of an unknown number
MIB = 2**20
MAX_NAME = 24  # characters
FILTERS = ("markdown", "plain", "percent", "mib", "span", "seeds")  # of the templates


def markdown(table: Sequence[Sequence[str]]) -> str:
    """A table with its header first.

    The first column stands on the left; a cell may have several lines.
    """
    header, *rows = table
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    escaped = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |".replace("\n", "<br>") for line in escaped)


def plain(table: Sequence[Sequence[str]]) -> str:
    """A table for a terminal."""
    header, *rows = table
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = (
        [line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]
        for line in (header, ["-" * width for width in widths], *rows)
    )
    return "".join("  ".join(line) + "\n" for line in lines)


def plus_minus(
    value: Spread | None, decimals: int = 2, sign: str = "", unit: str = "", scale: float = 1
) -> str:
    """`98.02 ± 0.03`. One seed has no deviation. A missing value is `-`."""
    if value is None:
        return NONE
    mean = f"{scale * value.mean:{sign}z.{decimals}f}{unit}"  # z: no -0.00
    return mean if value.std is None else f"{mean} ± {scale * value.std:.{decimals}f}"


def in_unit(value: Spread | None, metric: Metric, sign: str = "") -> str:
    """`91.00 ± 2.65` for fractions in percent, `0.9100 ± 0.0265` for other metrics."""
    return plus_minus(value, metric.decimals, sign, scale=metric.factor)


def percent(value: Spread | None, sign: str = "") -> str:
    """`91.00 ± 2.65` of fractions."""
    return plus_minus(value, sign=sign, scale=100)


def points(difference: float, metric: Metric) -> str:
    """`+1.50` of a fraction, `+0.0150` of other metrics."""
    return f"{metric.factor * difference:+z.{metric.decimals}f}"


def short(name: str) -> str:
    """A name of the user for a narrow place: in one line, and cut if it is long."""
    name = one_line(name)
    return f"{name[: MAX_NAME - 1]}…" if len(name) > MAX_NAME else name


def mib(size: float) -> str:
    """MiB of bytes with three significant digits, never in exponent form."""
    return f"{size / MIB:#.3g}".rstrip(".") if size < 1000 * MIB else f"{size / MIB:.0f}"


def span(values: Collection[int]) -> str:
    """`10 to 30 (median 20)`, or the one value that all have."""
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high} (median {statistics.median(values):g})"


def seeds(numbers: Collection[int]) -> str:
    """`seeds 0, 1, 2`."""
    return f"seed{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


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
