"""Reads tables from files and from memory: their columns as numbers or names, their rows in two
parts."""

from __future__ import annotations

import functools
import gzip
import math
import re
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedml_noniid import extras
from fedml_noniid.core.errors import UserError, shown
from fedml_noniid.data.checks import known, refusal
from fedml_noniid.data.readers import user_data
from fedml_noniid.data.readers.user_data import Labels
from fedml_noniid.data.types import Floats, Ints

if TYPE_CHECKING:  # pandas takes half a second to import, and only these readers need it
    import pandas as pd

ENDINGS = (".csv", ".csv.gz", ".parquet")
# What stands for a missing number, in lower case.
MISSING = ("", "na", "n/a", "nan", "null", "none", "?")
HEAD = 100  # rows that tell which columns are numbers
NAMELESS = ""  # a cell of text that is missing
MAX_ADVISED = 50  # categories of a column for which one_hot is advised
LEAVE_OUT = "leave it out (`drop`)"
DATE = re.compile(
    r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3\d{2,4})([ T]\d{1,2}:\d{2}.*)?"
)


LIKE_NUMBER = re.compile(
    r"[^\w]*\d+([.,' ]\d+)+\W*|[^\w]*\d+([.,' ]\d+)*\W+[^\d]*"
)  # 1,5; 5 mg; 7%
EXACT = 2**53  # up to here, float64 has each whole number
Columns = str | Sequence[str] | None  # as options name them
Cells = Floats | Labels  # [n] of one column: float64 with NaN, or text with NAMELESS


class Table(NamedTuple):
    """A table; its columns have different names of text, its rows are counted from 1 in
    messages."""

    name: str  # of the file, in messages
    frame: pd.DataFrame


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


def tables_of(
    root: Path, file: object, test_file: object, is_number: Callable[[str], bool] = lambda _: False
) -> list[Table]:
    """One or two tables: files under `root`, the ending tells the format; or data frames.

    `is_number`: the columns, by name, that have to be numbers. UserError for missing and damaged
    files, and for other objects.
    """
    if isinstance(file, str) and test_file == file:
        raise refusal("test_file", test_file, "another file than `file`, or none")
    sources = (("file", "frame", file), ("test_file", "test", test_file))
    return [_read(root, *one, is_number) for one in sources[: 1 if test_file is None else 2]]


def _read(
    root: Path, key: str, argument: str, source: object, is_number: Callable[[str], bool]
) -> Table:
    """One table. `key` is its option in params.yaml, `argument` its name in Python."""
    import pandas as pd

    if isinstance(source, pd.DataFrame):
        return table_of(argument, source)
    if not isinstance(source, str):
        raise UserError(f"{argument} is a {type(source).__name__}; allowed: a pandas.DataFrame")
    if not source.endswith(ENDINGS):
        raise refusal(key, source, f"the name of a file that ends in {', '.join(ENDINGS)}")
    path = root / source
    if not path.is_file():
        there = sorted(
            entry.name
            for entry in root.glob("*")
            if entry.name.endswith(ENDINGS) and entry.is_file()
        )
        raise UserError(
            f"{path}: there is no such file; {key} is relative to root, where there is "
            f"{user_data.listed(there) or 'none'}"
        )
    frame = _parquet(path) if source.endswith(".parquet") else _csv(path, is_number)
    return table_of(str(path), frame)


def _csv(path: Path, is_number: Callable[[str], bool]) -> pd.DataFrame:
    """A table of text, in which nothing counts as missing: a class may be called NA or None.

    The columns that have to be numbers are float64, if all are numbers that float64 has exactly.
    """
    import pandas as pd

    # The first line is read as a row: pandas would rename columns of the same name.
    read = functools.partial(
        pd.read_csv, path, header=None, dtype=str, na_filter=False, encoding="utf-8-sig"
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if b"\0" in line:
                        raise ValueError(f"line {number} has a NUL byte")
            names = [str(name) for name in read(nrows=1).iloc[0]]
            other = next((mark for mark in ";\t|" if mark in names[0]), None)
            if len(names) == 1 and other:
                raise ValueError(f"its columns are separated by {other!r}; allowed: commas")
            numbers = [i for i, name in enumerate(names) if is_number(name)]
            rows = _numbers(read, names, numbers) if numbers else None
            rows = read().iloc[1:] if rows is None else rows
    except (ValueError, pd.errors.ParserWarning, zlib.error, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's own: permissions, the disk
        reason = " ".join(str(error).split()).removeprefix("Error tokenizing data. C error: ")
        raise UserError(
            f"{path}: can't be read as CSV ({reason}); needed: UTF-8, the names of the columns in "
            "the first line, and as many cells in each line"
        ) from None
    rows.columns = pd.Index(names)
    return rows


def exactly() -> dict[str, Any]:
    """Options with which `read_csv` reads a number as Python does, to the last bit. From 3.1 on
    pandas always does."""
    import pandas as pd

    return (
        {}
        if [*map(int, pd.__version__.split(".")[:2])] >= [3, 1]
        else {"float_precision": "round_trip"}
    )


def _numbers(
    read: Callable[..., pd.DataFrame], names: Sequence[str], numbers: list[int]
) -> pd.DataFrame | None:
    """A CSV with these names of columns; those at the positions `numbers` are float64, if they
    begin with numbers.

    None unless all of their cells are empty or numbers that float64 has exactly.
    """
    import pandas as pd

    read = functools.partial(read, header=0, names=range(len(names)))
    empty = [form(cell) for cell in MISSING for form in (str, str.upper, str.title)]
    try:
        # Columns of text show in the first rows; so do truth values, of which pandas makes 0 and 1.
        head = read(nrows=HEAD)
        cells = {i: [_number(cell) for cell in head[i] if not _is_empty(cell)] for i in numbers}
        numbers = [i for i in numbers if cells[i] and not np.isnan(cells[i]).any()]
        rows = read(
            dtype=dict.fromkeys(range(len(names)), str) | dict.fromkeys(numbers, np.float64),
            na_filter=True,
            keep_default_na=False,
            na_values=dict.fromkeys(numbers, empty),
            **exactly(),
        )
    except (ValueError, pd.errors.ParserWarning):
        return None
    # pandas takes the first cells for an index, if lines have one too many, and the names for a row
    # too, if a bare CR and a blank follow.
    is_whole = isinstance(rows.index, pd.RangeIndex) and not (head[:1] == names).all(axis=None)
    return None if not is_whole or any(rows[i].abs().max() > EXACT for i in numbers) else rows


def _parquet(path: Path) -> pd.DataFrame:
    extras.require(extras.PIPELINE, "pyarrow")
    import pandas as pd
    import pyarrow

    try:
        return pd.read_parquet(path)
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(
            f"{path}: can't be read as parquet ({reason[:200]}); write it again"
        ) from None


def without(tables: Sequence[Table], cells: Sequence[str]) -> list[Table]:
    """The tables without the values that option `na` names. UserError for a cell that none has."""
    for cell in cells:
        if not any((table.frame == cell).any(axis=None) for table in tables):
            raise refusal("na", cell, f"texts of cells of {tables[0].name}")
    return [table._replace(frame=table.frame.mask(table.frame.isin([*cells]))) for table in tables]


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
        numbers = np.fromiter(map(_number, values), dtype=np.float64, count=len(values))
        for i in np.flatnonzero(np.isnan(numbers)):
            name = _name(values[i])
            if name is None or not _is_empty(name):
                row = int((number == i).argmax())
                raise _no_number(table.name, column, row, values, number)
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


def _is_empty(cell: str) -> bool:
    """Whether a cell of text says that a number is missing."""
    return cell.strip().lower() in MISSING


def _number(value: Any) -> float:
    """The number in a cell; NaN if it is missing or something else.

    Python also takes 1_000, NumPy also drops imaginary parts, and others drop units; tables don't.
    """
    odd = isinstance(value, np.complexfloating) or hasattr(type(value), "units")
    try:
        return math.nan if odd or (isinstance(value, str) and "_" in value) else float(value)
    except (TypeError, ValueError):
        return math.nan


def _no_number(
    table: str, column: str, row: int, values: Sequence[Any], number: Ints
) -> ColumnError:
    """What to do with a column of text, as its cells look; `values` and `number` are those of
    `_different`."""
    value, cells = values[number[row]], Counter[str]()
    for one, times in zip(values, np.bincount(number).tolist(), strict=True):
        if name := _name(one):
            cells[name] += times

    def mostly(like: Callable[[str], object]) -> bool:
        return 2 * sum(times for cell, times in cells.items() if like(cell)) > cells.total()

    others = sorted({cell for cell in cells if math.isnan(_number(cell))} - {*MISSING})
    are_numbers = mostly(lambda cell: not math.isnan(_number(cell)))
    correct = "most cells are numbers: correct the others"
    in_na = f"{correct}, or name them in `na`, as missing: {user_data.listed([*map(repr, others)])}"
    rules = (  # the first that holds: the advice, and the option in it
        (_name(value) is None, LEAVE_OUT, "drop"),
        (
            mostly(lambda cell: DATE.fullmatch(cell.strip())),
            f"dates: {LEAVE_OUT}, or write numbers such as years in their place",
            "drop",
        ),
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
    return ColumnError(table, column, problem, option, others if option == "na" else ())


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
    where = [f"{source}: column {', '.join(map(repr, named))}" for source in sources]
    if targets:
        columns = [np.column_stack(part) for part in zip(*map(cells.get, targets), strict=True)]
        names, y = user_data.targets(columns, targets, where, lambda i: f"row {i + 1}")
    else:
        names, y = user_data.classified(cells[named[0]], where, lambda i: f"row {i + 1}")
    return user_data.rows_of(names, y, owners, test_share, sources)
