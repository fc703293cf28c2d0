"""The columns of tables, as numbers or as names. An error says which option helps."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedml_noniid.core.errors import UserError, shown
from fedml_noniid.data.checks import known, refusal
from fedml_noniid.data.readers import user_data
from fedml_noniid.data.types import Floats, Ints

if TYPE_CHECKING:  # pandas takes half a second to import, and only these readers need it
    import pandas as pd

# What stands for a missing number, in lower case.
MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
MAX_ADVISED = 50  # categories of a column for which one_hot is advised
LEAVE_OUT = "leave it out (`drop`)"
DATE = re.compile(
    r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3\d{2,4})([ T]\d{1,2}:\d{2}.*)?"
)
# With units or other signs: 5 mg; 7%; 1 000.
LIKE_NUMBER = re.compile(r"[^\w]*\d+([.,' ]\d+)+\W*|[^\w]*\d+([.,' ]\d+)*\W+[^\d]*")
MARKED = re.compile(r"[+-]?\d[\d.,]*([eE][+-]?\d+)?")  # 1,5; 1.234,5
EXACT = 2**53  # up to here, float64 has each whole number
Columns = str | Sequence[str] | None  # as options name them
Cells = Any  # [n] of one column: float64 with NaN, or pandas.Categorical of text; NaN is missing


class Dialect(NamedTuple):
    """How a file is to be read, and how a CSV was read; None: as the file itself shows."""

    separator: str | None = None
    decimal: str | None = None
    encoding: str | None = None  # None: UTF-8
    sheet: str | None = None


class Table(NamedTuple):
    """A table; its columns have different names of text, its rows are counted from 1 in
    messages."""

    name: str  # of the file, in messages
    frame: pd.DataFrame
    csv: Dialect | None = None  # the marks of a CSV
    note: str = ""  # how it was read, if not as most are

    @property
    def decimal(self) -> str:
        return (self.csv and self.csv.decimal) or "."


class ColumnError(UserError):
    """A column that can't be used as it is.

    `option`: the one of data set `table` that is advised, "" for none. `cells`: the texts among
    its numbers.
    """

    def __init__(
        self,
        table: str,
        column: str,
        problem: str,
        option: str = "drop",
        cells: Sequence[str] = (),
    ) -> None:
        super().__init__(f"{table}: column {column!r} {problem}")
        self.column, self.option, self.cells = column, option, cells
        self.args = (table, column, problem, option, cells)  # of which a copy is made


class UndecidedError(UserError):
    """All columns of a table that need a decision, a line for each."""

    def __init__(self, errors: Sequence[UserError]) -> None:
        super().__init__()
        self.mistakes = tuple(mistake for error in errors for mistake in error.mistakes)
        self.errors = errors
        self.args = (errors,)  # of which a copy is made


def exactly() -> dict[str, Any]:
    """Options with which `read_csv` reads a number as Python does, to the last bit. From 3.1 on
    pandas always does."""
    import pandas as pd

    is_exact = [*map(int, pd.__version__.split(".")[:2])] >= [3, 1]
    return {} if is_exact else {"float_precision": "round_trip"}


def table_of(name: str, frame: pd.DataFrame) -> Table:
    """A data frame as a table. Its columns' names become text: in a table made of an array they are
    numbers. UserError."""
    columns = [str(column) for column in frame.columns]
    for i, column in enumerate(columns):
        if not column.strip() or not column.isprintable():
            raise UserError(
                f"{name}: column {i + 1} of {len(columns)} is called {column!r}; allowed: a name "
                "in one line (pandas writes its index without one, unless index=False)"
            )
        if column in columns[:i]:
            raise UserError(f"{name}: column {column!r} is there twice; each name is allowed once")
    if len(frame) == 0:
        raise UserError(f"{name}: has no rows; needed: at least 2 of each class")
    frame = frame.copy(deep=False)
    frame.index, frame.columns = range(len(frame)), columns
    return Table(name, frame)


def listed(columns: Columns) -> list[str]:
    """The columns of an option that names one or several, or none."""
    return [columns] if isinstance(columns, str) else [*(columns or ())]


def columns_of(table: Table, key: str, columns: Columns, used: Mapping[str, str]) -> list[str]:
    """The columns that option `key` names.

    UserError unless the table has them, and they are named once and not `used` (column -> the
    option that uses it).
    """
    named = listed(columns)
    for i, column in enumerate(named):
        known(f"{table.name}: {key}: column", column, table.frame.columns)
        if column in used:
            raise refusal(key, column, f"columns that are not in `{used[column]}`")
        if column in named[:i]:
            raise refusal(key, column, "each column once")
    return named


def used_columns(table: Table, **options: Columns) -> dict[str, str]:
    """Column -> the option that names it. UserError as `columns_of`."""
    used: dict[str, str] = {}
    for key, columns in options.items():
        used |= dict.fromkeys(columns_of(table, key, columns, used), key)
    return used


def check_columns(tables: Sequence[Table], columns: Sequence[str]) -> None:
    """UserError unless all tables have these columns."""
    for table in tables:
        for column in columns:
            known(f"{table.name}: column", column, table.frame.columns)


def texts_of(table: Table, column: str) -> pd.Categorical:
    """A column as text, [n]. ColumnError for lists and such."""
    import pandas as pd

    number, values = _different(table.frame[column])
    texts = []
    for i, value in enumerate(values):
        if not _is_name(value):
            problem = f"is {shown(value)} in row {_row(number, i)}; allowed: text, numbers"
            raise ColumnError(table.name, column, problem)
        texts.append(_text(value))
    return pd.Categorical(texts).take(number, allow_fill=True)


def _different(series: pd.Series[Any]) -> tuple[Ints, list[Any]]:
    """(the number of each row's value [n], -1 where it is missing; the different values in the
    order of their first rows)."""
    import pandas as pd

    if series.dtype == object and pd.api.types.infer_dtype(series) != "string":
        return np.arange(len(series)), series.tolist()  # True, 1 and 1.0 would become one
    number, values = pd.factorize(series)
    return number.astype(np.int64), pd.Series(values).tolist()


def _row(number: Ints, value: int) -> int:
    """The first row with a value, from 1."""
    return int((number == value).argmax()) + 1


def _is_name(value: object) -> bool:
    """Whether a cell has a text or a number, or is missing."""
    import pandas as pd

    kinds = (str, bool, np.bool_, int, np.integer, float, np.floating)
    return isinstance(value, kinds) or (pd.api.types.is_scalar(value) and bool(pd.isna(value)))


def _text(value: object) -> str | None:
    """The text in a cell, None if it is missing or blank."""
    import pandas as pd

    if pd.isna(value):
        return None
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)
    return str(value) if str(value).strip() else None


def numbers_of(table: Table, column: str, is_feature: bool = True) -> Floats:
    """A column as numbers that float32 can hold, NaN where it is missing, [n].

    ColumnError for other things, without an option that only a feature may have.
    """
    series: pd.Series[Any] = table.frame[column]
    if series.dtype.kind in "biuf":  # truth values are numbers, too
        cells: Floats = series.to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        # Python's float, since pd.to_numeric rounds the last bit in another way and takes 1e400 for
        # missing.
        number, values = _different(series.astype(object))
        numbers = np.array([*(number_in(value, table.decimal) for value in values), math.nan])
        for i, value in enumerate(values):
            if math.isnan(numbers[i]) and not (_is_name(value) and is_empty(_text(value) or "")):
                raise _no_number(table, column, _row(number, i), value, is_feature)
        cells = numbers[number]
    for i in np.flatnonzero(np.abs(cells) > EXACT).tolist():
        digits = str(series[i]).strip()
        wrong = None
        if abs(cells[i]) > np.finfo(np.float32).max:
            wrong = refusal(f"in row {i + 1}", cells[i].item(), "finite numbers of float32")
        elif digits.lstrip("+-").isdigit() and int(digits) != cells[i].item():
            allowed = "whole numbers up to 2^53; subtract a constant"
            wrong = refusal(f"in row {i + 1}", int(digits), allowed)
        if wrong is not None:
            raise ColumnError(table.name, column, str(wrong), "drop" if is_feature else "")
    return cells


def is_empty(cell: str) -> bool:
    """Whether a cell of text says that a number is missing."""
    return cell.strip().lower() in MISSING


def number_in(value: Any, decimal: str = ".") -> float:
    """The number in a cell; NaN if it is missing or something else.

    Python also takes 1_000, NumPy also drops imaginary parts, and others drop units; tables don't.
    """
    odd = isinstance(value, np.complexfloating) or hasattr(type(value), "units")
    if isinstance(value, str):
        odd = "_" in value or (decimal == "," and "." in value)
        value = value.replace(decimal, ".")
    try:
        return math.nan if odd else float(value)
    except (TypeError, ValueError):
        return math.nan


def _no_number(table: Table, column: str, row: int, value: object, is_feature: bool) -> ColumnError:
    """What to do with a column of text, as its cells look; `value` is the first that is no
    number."""
    other = "." if table.decimal == "," else ","
    texts = table.frame[column].dropna().astype(str)
    counts = texts[texts.str.strip() != ""].value_counts()
    total = int(counts.sum())
    is_number = np.array([not math.isnan(number_in(cell, table.decimal)) for cell in counts.index])
    are_numbers = 2 * counts[is_number].sum() > total
    others = sorted({*counts.index[~is_number]} - {*MISSING})
    marked = [cell for cell in others if other in cell and MARKED.fullmatch(cell.strip())]
    is_plain = table.csv is None or table.csv[:2] == (",", ".")
    are_marked = 2 * counts[marked].sum() > total or (marked and are_numbers and not is_plain)
    dates, signs = (
        [cell for cell in others if pattern.fullmatch(cell.strip())]
        for pattern in (DATE, LIKE_NUMBER)
    )
    cells: Sequence[str] = ()
    if not _is_name(value):
        advice, option = LEAVE_OUT, "drop"
    elif 2 * counts[dates].sum() > total:
        advice, option = f"dates: {LEAVE_OUT}", "drop"
    elif table.csv is not None and are_marked:
        advice = f"numbers such as {marked[0]!r} need {other!r} as `decimal`, or no thousands mark"
        option = ""
    elif are_numbers and len(others) <= MAX_ADVISED:
        advice = "most cells are numbers: correct the others, or name them in `na`, as missing: "
        advice, option, cells = advice + user_data.listed([*map(repr, others)]), "na", others
    elif are_numbers:
        advice, option = "most cells are numbers: correct the others", ""
    elif 2 * counts[signs].sum() > total:
        advice = f"write numbers with a point, without units and other signs, or {LEAVE_OUT}"
        option = ""
    elif len(counts) > MAX_ADVISED:
        advice, option = f"{len(counts)} different texts in {total} rows: {LEAVE_OUT}", "drop"
    else:
        advice, option = f"name a column of categories in one_hot, or {LEAVE_OUT}", "one_hot"
    if not is_feature and option in ("drop", "one_hot"):
        advice, option = "a column of classes is a `label`", ""
    problem = f"is {shown(value)} in row {row}; allowed: numbers; {advice}"
    return ColumnError(table.name, column, problem, option, cells)


def complete(table: Table, column: str, cells: Cells, options: Sequence[str] = ()) -> Any:
    """The `cells` of a column. ColumnError if rows have no value.

    `options`: those that are advised, of `missing` and `drop`.
    """
    import pandas as pd

    missing = pd.isna(cells)
    if not missing.any():
        return cells
    several = f"{missing.sum()} rows, first in " if missing.sum() > 1 else ""
    mostly = "drop" in options and 2 * missing.sum() > len(missing)
    advice = "leave a column out that is mostly empty (`drop`), or " if mostly else ""
    problem = (
        f"has no value in {several}row {missing.argmax() + 1}; allowed: {advice}fill or remove "
        + ("them (`missing`)" if "missing" in options else "them")
    )
    raise ColumnError(table.name, column, problem, "drop" if mostly else "missing")


def rows_of(
    sources: Sequence[str],
    used: Mapping[str, str],
    cells: Mapping[str, Sequence[Cells]],
    test_share: float | None,
) -> user_data.Rows:
    """The rows that train and that test, by the complete `cells` of each column and table.

    `sources`: the names of the tables; `used`: the columns of label or target, and of the owner.
    """
    by_option = {option: column for column, option in used.items()}
    targets = [column for column, option in used.items() if option == "target"]
    named = targets or [by_option["label"]]
    origins = [f"{source}: column {', '.join(map(repr, named))}" for source in sources]
    if targets:
        columns = [np.column_stack(part) for part in zip(*map(cells.get, targets), strict=True)]
        names, y = user_data.targets(columns, targets, origins, lambda i: f"row {i + 1}")
    else:
        names, y = user_data.classified(cells[named[0]], origins, lambda i: f"row {i + 1}")
    owners = cells[by_option["owner"]] if "owner" in by_option else None
    return user_data.rows_of(names, y, owners, test_share, sources)
