"""Reads the columns of tables as numbers or names, and the rows in two parts."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedml_noniid.core.errors import UserError, shown
from fedml_noniid.data.checks import known, refusal
from fedml_noniid.data.readers import user_data
from fedml_noniid.data.readers.user_data import Labels
from fedml_noniid.data.types import Floats, Ints

if TYPE_CHECKING:  # pandas takes half a second to import, and only these readers need it
    import pandas as pd

# What stands for a missing number, in lower case.
MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
NAMELESS = ""  # a cell of text that is missing
MAX_ADVISED = 50  # categories of a column for which one_hot is advised
LEAVE_OUT = "leave it out (`drop`)"
DATE = re.compile(
    r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3\d{2,4})([ T]\d{1,2}:\d{2}.*)?"
)


LIKE_NUMBER = re.compile(
    r"[^\w]*\d+([.,' ]\d+)+\W*|[^\w]*\d+([.,' ]\d+)*\W+[^\d]*"
)  # 1,5; 5 mg; 7%
MARKED = re.compile(r"[+-]?\d[\d.,]*([eE][+-]?\d+)?")  # 1,5; 1.234,5
EXACT = 2**53  # up to here, float64 has each whole number
Columns = str | Sequence[str] | None  # as options name them
Cells = Floats | Labels  # [n] of one column: float64 with NaN, or text with NAMELESS


class Marks(NamedTuple):
    """The marks of a CSV."""

    separator: str
    decimal: str
    encoding: str | None = None  # None: UTF-8


class Table(NamedTuple):
    """A table; its columns have different names of text, its rows are counted from 1 in
    messages."""

    name: str  # of the file, in messages
    frame: pd.DataFrame
    marks: Marks | None = None  # of a CSV
    note: str = ""  # how it was read, if not as most are

    @property
    def decimal(self) -> str:
        return self.marks.decimal if self.marks is not None else "."


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

    return (
        {}
        if [*map(int, pd.__version__.split(".")[:2])] >= [3, 1]
        else {"float_precision": "round_trip"}
    )


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


def without_owners(
    tables: Sequence[Table], column: str, owners: Sequence[str]
) -> tuple[list[Table], Table]:
    """(the tables without the rows of some owners, a table of these rows). UserError if a table is
    then empty."""
    import pandas as pd

    is_apart = [texts_of(table, column).among(owners) >= 0 for table in tables]
    others = []
    for table, rows in zip(tables, is_apart, strict=True):
        if rows.all():
            raise UserError(f"{table.name}: each row is of an owner that takes no part")
        others.append(table._replace(frame=table.frame[~rows].reset_index(drop=True)))
    frames = [table.frame[rows] for table, rows in zip(tables, is_apart, strict=True)]
    return others, tables[0]._replace(frame=pd.concat(frames, ignore_index=True))


def columns_of(
    tables: Sequence[Table], key: str, columns: Columns, used: Mapping[str, str]
) -> list[str]:
    """The columns that option `key` names.

    UserError unless all `tables` have them, and they are named once and not `used` (column -> the
    option that uses it).
    """
    named = listed(columns)
    for i, column in enumerate(named):
        for table in tables:
            known(f"{table.name}: {key}: column", column, table.frame.columns)
        if column in used:
            raise refusal(key, column, f"columns that aren't the {used[column]}")
        if column in named[:i]:
            raise refusal(key, column, "each column once")
    return named


def used_columns(tables: Sequence[Table], **options: Columns) -> dict[str, str]:
    """Column -> the option that names it. UserError as `columns_of`."""
    used: dict[str, str] = {}
    for key, columns in options.items():
        used |= dict.fromkeys(columns_of(tables, key, columns, used), key)
    return used


def listed(columns: Columns) -> list[str]:
    """The columns of an option that names one or several, or none."""
    return [columns] if isinstance(columns, str) else [*(columns or ())]


def texts_of(table: Table, column: str) -> Labels:
    """A column as text, NAMELESS where it is missing, [n]. ColumnError for lists and such."""
    values, number = _different(table.frame[column])
    names = [_name(value) for value in values]
    if None in names:
        i = int((number == names.index(None)).argmax())
        problem = f"is {shown(table.frame[column][i])} in row {i + 1}; allowed: text, numbers"
        raise ColumnError(table.name, column, problem)
    texts = Labels.from_texts([name for name in names if name is not None])
    return Labels(texts.texts, texts.number[number])


def _different(series: pd.Series[Any]) -> tuple[list[Any], Ints]:
    """(the values of a column in the order of their first rows, the one of each row [n])."""
    import pandas as pd

    if series.dtype == object and pd.api.types.infer_dtype(series) != "string":
        return series.tolist(), np.arange(len(series))  # True, 1 and 1.0 would become one
    number, values = pd.factorize(series, use_na_sentinel=False)
    return pd.Series(values).tolist(), number


def taken(cells: Cells, rows: NDArray[Any]) -> Any:
    """The cells of some rows, by their numbers or by a mask."""
    if not isinstance(cells, Labels):
        return cells[rows]
    used, number = np.unique(cells.number[rows], return_inverse=True)
    return Labels([cells.texts[i] for i in used], number)


def is_missing(cells: Cells) -> NDArray[np.bool_]:
    """Where a column of names or of numbers has no value, [n]."""
    return cells.among([NAMELESS]) >= 0 if isinstance(cells, Labels) else np.isnan(cells)


def _name(value: object) -> str | None:
    """The name in a cell: NAMELESS if it is missing or blank, None if it is no name."""
    import pandas as pd

    if pd.api.types.is_scalar(value) and pd.isna(value):
        return NAMELESS
    if isinstance(value, float | np.floating) and float(value).is_integer():
        value = int(value)
    if not isinstance(value, str | bool | np.bool_ | int | np.integer | float | np.floating):
        return None
    return str(value) if str(value).strip() else NAMELESS


def numbers_of(table: Table, column: str) -> Floats:
    """A column as numbers that float32 can hold, NaN where it is missing, [n].

    ColumnError for other things.
    """

    series: pd.Series[Any] = table.frame[column]
    if series.dtype.kind in "biuf":  # truth values are numbers, too
        cells: Floats = series.to_numpy(dtype=np.float64, na_value=np.nan)
    else:
        # Python's float, since pd.to_numeric rounds the last bit in another way and takes 1e400 for
        # missing.
        values, number = _different(series.astype(object))
        numbers = np.fromiter(
            (number_in(value, table.decimal) for value in values), np.float64, len(values)
        )
        for i in np.flatnonzero(np.isnan(numbers)):
            name = _name(values[i])
            if name is None or not is_empty(name):
                row = int((number == i).argmax())
                raise _no_number(table, column, row, values, number)
        cells = numbers[number]
    large = np.flatnonzero(np.abs(cells) > EXACT)
    too_large = large[np.abs(cells[large]) > np.finfo(np.float32).max]
    for i in too_large[:1].tolist():
        wrong = refusal(f"in row {i + 1}", cells[i].item(), "finite numbers of float32")
        raise ColumnError(table.name, column, str(wrong))
    for i in large.tolist():
        digits = str(series[i]).strip()
        if digits.lstrip("+-").isdigit() and int(digits) != cells[i].item():
            wrong = refusal(f"in row {i + 1}", int(digits), "whole numbers up to 2^53")
            raise ColumnError(table.name, column, f"{wrong}; subtract a constant")
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


def _no_number(
    table: Table, column: str, row: int, values: Sequence[Any], number: Ints
) -> ColumnError:
    """What to do with a column of text, as its cells look; `values` and `number` are those of
    `_different`."""
    value, cells = values[number[row]], Counter[str]()
    for cell, times in zip(values, np.bincount(number).tolist(), strict=True):
        if name := _name(cell):
            cells[name] += times

    def mostly(like: Callable[[str], object]) -> bool:
        return 2 * sum(times for cell, times in cells.items() if like(cell)) > cells.total()

    others = sorted(
        {cell for cell in cells if math.isnan(number_in(cell, table.decimal))} - {*MISSING}
    )
    are_numbers = mostly(lambda cell: not math.isnan(number_in(cell, table.decimal)))
    other = "." if table.decimal == "," else ","
    marked = {cell for cell in others if other in cell and MARKED.fullmatch(cell.strip())}
    is_plain = table.marks is None or table.marks[:2] == (",", ".")
    are_marked = mostly(marked.__contains__) or bool(marked and are_numbers and not is_plain)
    correct = "most cells are numbers: correct the others"
    in_na = f"{correct}, or name them in `na`, as missing: {user_data.listed([*map(repr, others)])}"
    rules = (  # the first that holds: the advice, and the option in it
        (_name(value) is None, LEAVE_OUT, "drop"),
        (
            mostly(lambda cell: DATE.fullmatch(cell.strip())),
            f"dates: {LEAVE_OUT}, or write numbers such as years in their place",
            "drop",
        ),
        (table.marks is not None and are_marked, _of_marks(table, marked, other), ""),
        (are_numbers and len(others) <= MAX_ADVISED, in_na, "na"),
        (are_numbers, correct, ""),
        (
            mostly(lambda cell: LIKE_NUMBER.fullmatch(cell.strip())),
            f"write numbers with a point, without units and other signs, or {LEAVE_OUT}",
            "",
        ),
        (
            len(cells) > MAX_ADVISED,
            f"{len(cells)} different texts in {cells.total()} rows: {LEAVE_OUT}",
            "drop",
        ),
        (True, f"name a column of categories in one_hot, or {LEAVE_OUT}", "one_hot"),
    )
    advice, option = next((advice, option) for holds, advice, option in rules if holds)
    problem = f"is {shown(value)} in row {row + 1}; allowed: numbers; {advice}"
    return ColumnError(table.name, column, problem, option, others if option == "na" else ())


def _of_marks(table: Table, cells: Iterable[str], other: str) -> str:
    """What to do with numbers of a CSV that have another mark than that of its decimals."""
    separator, decimal, encoding = table.marks or Marks(",", ".")
    options = f"sep={separator!r}, decimal={decimal!r}, thousands={other!r}"
    options += f", encoding={encoding!r}" if encoding is not None else ""
    return (
        f"numbers such as {min(cells, default='')!r} need {other!r} as `decimal`, or, where it "
        f"separates thousands, this line: pd.read_csv({Path(table.name).name!r}, {options})"
        ".to_csv('new.csv', index=False)"
    )


def complete(table: Table, column: str, cells: Cells, options: Sequence[str] = ()) -> Any:
    """The `cells` of a column. ColumnError if rows have no value.

    `options`: those that are advised, of `missing` and `drop`.
    """
    missing = is_missing(cells)
    if not missing.any():
        return cells
    several = f"{missing.sum()} rows, first in " if missing.sum() > 1 else ""
    mostly = "drop" in options and 2 * missing.sum() > len(missing)
    advice = "leave a column out that is mostly empty (`drop`), or " if mostly else ""
    problem = (
        f"has no value in {several}row {missing.argmax() + 1}; allowed: {advice}fill or remove"
    )
    problem += " them (`missing`)" if "missing" in options else " them"
    raise ColumnError(table.name, column, problem, "drop" if mostly else "missing")


def rows_of(
    sources: Sequence[str],
    used: Mapping[str, str],
    cells: Mapping[str, Sequence[Any]],
    test_share: float | None,
) -> user_data.Rows:
    """The rows that train and that test, by the complete `cells` of each column and table.

    `sources`: the names of the tables; `used`: the columns of label or target, and of the owner.
    """
    owners = next((cells[column] for column in used if used[column] == "owner"), None)
    targets = [column for column in used if used[column] == "target"]
    named = targets or [column for column in used if used[column] == "label"]
    origins = [f"{source}: column {', '.join(map(repr, named))}" for source in sources]
    if targets:
        columns = [np.column_stack(part) for part in zip(*map(cells.get, targets), strict=True)]
        names, y = user_data.targets(columns, targets, origins, lambda i: f"row {i + 1}")
    else:
        names, y = user_data.classified(cells[named[0]], origins, lambda i: f"row {i + 1}")
    return user_data.rows_of(names, y, owners, test_share, sources)
