"""Reads tables from files: CSV with its separator, decimal mark and encoding; Excel; parquet.

Nothing is guessed in silence: a CSV that has other marks than commas, points and UTF-8 gets a note
that says how it was read, and one that can be read in two ways is refused.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import functools
import gzip
import itertools
import re
import warnings
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator

from fedml_noniid import extras
from fedml_noniid.core.errors import UserError
from fedml_noniid.data.checks import known, refusal
from fedml_noniid.data.readers.frames import EXACT, MISSING, Dialect, Table, exactly, table_of
from fedml_noniid.data.readers.user_data import listed

if TYPE_CHECKING:  # see frames.py
    import pandas as pd

CSV = (".csv", ".csv.gz")
ENDINGS = (*CSV, ".parquet", ".xlsx")
SEPARATORS = (",", ";", "\t", "|")
# Options of `Dialect` -> the files that they are for.
READ_BY = {"separator": CSV, "decimal": CSV, "encoding": CSV, "sheet": (".xlsx",)}
HEAD = 100  # rows that tell which separator fits
CHUNK = 100_000  # rows of text in memory at a time
BYTES = 2**20  # read at a time
# Cells of numbers with decimals. In GROUPS, the mark may separate thousands as well.
DECIMALS = {
    ".": re.compile(r"[+-]?[\d,]*\.\d+(e[+-]?\d+)?", re.IGNORECASE),
    ",": re.compile(r"[+-]?[\d.]*,\d+(e[+-]?\d+)?", re.IGNORECASE),
}
GROUPS = re.compile(r"[+-]?[1-9]\d{0,2}([.,]\d{3})+")


def _encoding(name: str) -> str:
    try:
        "".encode(name)
    except LookupError:
        allowed = "the name of an encoding, such as cp1252 (Excel in Western Europe) or utf-16"
        raise UserError(value=name, allowed=allowed) from None
    return name


Separator = Literal[",", ";", "\t", "|"]
Decimal = Literal[".", ","]
Encoding = Annotated[str, AfterValidator(_encoding)]


def tables_of(
    root: Path,
    file: object,
    test_file: object,
    dialect: Dialect = Dialect(),  # noqa: B008  # a tuple
    is_number: Callable[[str], bool] = lambda _: False,
    na: Sequence[str] = (),
) -> list[Table]:
    """One or two tables: files under `root`, the ending tells the format; or data frames.

    `is_number`: the columns of a CSV, by name, that are to be numbers. Others are text. `na`: cells
    that become missing. UserError for missing and damaged files, for other
    objects, and for a cell of `na` that no table has.
    """
    if isinstance(file, str) and test_file == file:
        raise refusal("test_file", test_file, "another file than `file`, or none")
    sources = [("file", "frame", file)]
    sources += [("test_file", "test", test_file)] if test_file is not None else []
    tables = [_read(root, *source, dialect, is_number, bool(na)) for source in sources]
    for cell in na:
        if not any((table.frame == cell).any(axis=None) for table in tables):
            raise refusal("na", cell, f"texts of cells of {tables[0].name}")
    if na:
        tables = [
            table._replace(frame=table.frame.mask(table.frame.isin([*na]))) for table in tables
        ]
    return tables


def reading_notes(tables: Sequence[Table]) -> list[str]:
    """Notes on how the tables were read."""
    return list(dict.fromkeys(table.note for table in tables if table.note))


def _read(
    root: Path,
    key: str,
    argument: str,
    source: object,
    dialect: Dialect,
    is_number: Callable[[str], bool],
    as_text: bool,
) -> Table:
    """One table. `key` is its option in params.yaml, `argument` its name in Python. `as_text`:
    whether the text of all cells is needed."""
    import pandas as pd

    name = source if isinstance(source, str) else argument
    for option, endings in READ_BY.items():
        if (value := getattr(dialect, option)) is not None and not name.endswith(endings):
            raise refusal(option, value, f"none, since {name} is no {endings[0]}")
    if isinstance(source, pd.DataFrame):
        return table_of(argument, source)
    if not isinstance(source, str):
        raise UserError(f"{argument} is a {type(source).__name__}; allowed: a pandas.DataFrame")
    if not source.endswith(ENDINGS):
        raise refusal(key, source, f"the name of a file that ends in {', '.join(ENDINGS)}")
    path = root / source
    if not path.is_file():
        names = sorted(
            entry.name
            for entry in root.glob("*")
            if entry.name.endswith(ENDINGS) and entry.is_file()
        )
        raise UserError(
            f"{path}: there is no such file; {key} is relative to root, where there is "
            f"{listed(names) or 'none'}"
        )
    if source.endswith(CSV):
        return _csv(path, dialect, is_number, as_text)
    frame = _parquet(path) if source.endswith(".parquet") else _workbook(path, dialect.sheet)
    return table_of(str(path), frame)


def _csv(path: Path, dialect: Dialect, is_number: Callable[[str], bool], as_text: bool) -> Table:
    """A table of text, in which nothing counts as missing: a class may be called NA or None.

    Unless `as_text`, the columns that have to be numbers are, if all their cells are empty or
    numbers that float64 has exactly.
    """
    import pandas as pd

    encoding = dialect.encoding
    if encoding is not None and codecs.lookup(encoding).name in ("utf-8", "utf-8-sig"):
        encoding = None
    codec = encoding or "utf-8-sig"
    read = functools.partial(pd.read_csv, path, header=None, dtype=str, na_filter=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", pd.errors.DtypeWarning)  # these are read again
            _check_bytes(path, encoding)
            separator = dialect.separator or _separator(path, codec)
            read = functools.partial(read, encoding=codec, sep=separator)
            # The first line is read as a row: pandas would rename columns of the same name.
            names = [str(name) for name in read(nrows=1).iloc[0]]
            other = next((mark for mark in SEPARATORS if mark in names[0]), None)
            if dialect.separator and len(names) == 1 and other:
                raise ValueError(f"its columns are separated by {other!r}, not {separator!r}")
            numbers = [i for i, name in enumerate(names) if is_number(name)]
            decimal = dialect.decimal or "."
            if numbers and dialect.decimal is None and separator != ",":
                decimal = _decimal(path, read, names, numbers)
            rows = _rows(read, names, [] if as_text else numbers, decimal)
    except (ValueError, pd.errors.ParserWarning, zlib.error, EOFError, OSError) as error:
        is_of_system = isinstance(error, OSError) and error.errno is not None  # such as the disk
        if is_of_system or isinstance(error, UserError):
            raise
        reason = " ".join(str(error).split()).removeprefix("Error tokenizing data. C error: ")
        if isinstance(error, UnicodeDecodeError):
            reason += "; its `encoding` may be cp1252, as of German Excel"
        raise UserError(
            f"{path}: can't be read as CSV ({reason}); needed: {encoding or 'UTF-8'}, the names of "
            "the columns in the first line, and as many cells in each line"
        ) from None
    rows.columns = pd.Index(names)
    marks = {"separator": separator, "decimal": decimal}
    notes = [f"{key} {mark!r}" for key, mark in marks.items() if mark not in ",."[key == "decimal"]]
    notes += [f"encoding {encoding}"] if encoding is not None else []
    note = f"CSV read with {', '.join(notes)}" if notes else ""
    note += ", as German Excel writes it" if (separator, decimal) == (";", ",") else ""
    return table_of(str(path), rows)._replace(csv=Dialect(separator, decimal, encoding), note=note)


def _opened(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Opens a CSV."""
    opener: Any = gzip.open if path.suffix == ".gz" else open
    file: IO[Any] = opener(path, mode, **options)
    return file


def _check_bytes(path: Path, encoding: str | None) -> None:
    """ValueError for a NUL byte, UserError for another encoding than the file's own."""
    with _opened(path, "rb") as file:
        if encoding is None:
            for i, piece in enumerate(iter(functools.partial(file.read, BYTES), b"")):
                if not i and piece.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise UserError(f"{path}: is UTF-16; set `encoding` to utf-16")
                if b"\0" in piece:
                    raise ValueError("it has a NUL byte")
            return
        content = file.read()
    with contextlib.suppress(UnicodeDecodeError):
        if not content.isascii() and content.decode():
            raise refusal("encoding", encoding, f"none, as {path} is UTF-8")
    if "\0" in content.decode(encoding):
        raise ValueError("it has a NUL character")


def _separator(path: Path, encoding: str) -> str:
    """The separator of a CSV: the one that cuts each of the first rows into as many cells as there
    are names. Commas also fit where rows have fewer cells.

    UserError if two fit.
    """
    widths: dict[str, int] = {}
    fitting = []
    for mark in SEPARATORS:
        # Bytes of another encoding are refused when the file is read.
        with _opened(path, "rt", encoding=encoding, errors="replace", newline="") as file:
            rows = itertools.islice(csv.reader(file, delimiter=mark), 1 + HEAD)
            cells = []
            with contextlib.suppress(csv.Error):  # a very long cell, which pandas reads
                for row in filter(None, rows):
                    cells.append(len(row))
        width = widths[mark] = cells[0] if cells else 0
        least = 0 if mark == "," else width
        if width > 1 < len(cells) and all(least <= number <= width for number in cells):
            fitting.append(mark)
    if len(fitting) > 1:
        marks = " or ".join(map(repr, fitting))
        raise UserError(f"{path}: its cells may be separated by {marks}; set `separator` to one")
    return fitting[0] if fitting else max(widths, key=lambda mark: widths[mark])


def _decimal(
    path: Path, read: Callable[..., Any], names: Sequence[str], columns: Sequence[int]
) -> str:
    """The decimal mark of the numbers in some `columns` of a CSV.

    UserError if the mark may as well separate thousands.
    """
    import pandas as pd

    unsure = ""
    certain = set[str]()
    for rows in read(header=0, names=range(len(names)), usecols=columns, chunksize=CHUNK):
        for cell in map(str.strip, pd.unique(rows.to_numpy().ravel())):
            if GROUPS.fullmatch(cell):
                unsure = unsure or cell
                continue
            certain |= {mark for mark, number in DECIMALS.items() if number.fullmatch(cell)}
    if unsure and not certain:
        raise UserError(
            f"{path}: {unsure!r} may be a number with decimals, or thousands; set `decimal` "
            "to '.' or ',', the mark of decimals"
        )
    return "," if certain == {","} else "."


def _rows(
    read: Callable[..., pd.DataFrame], names: list[str], numbers: Sequence[int], decimal: str
) -> pd.DataFrame:
    """The rows of a CSV with these `names` of columns. Of those at the positions `numbers`, the
    ones are numbers of which all cells are empty or numbers that float64 has exactly; all others
    are text."""
    import pandas as pd

    empty = [form(cell) for cell in MISSING for form in (str, str.upper, str.title)]
    columns = range(len(names))
    rows = read(
        header=0,
        names=columns,
        dtype=dict.fromkeys({*columns} - {*numbers}, str),
        na_filter=True,
        keep_default_na=False,
        na_values=dict.fromkeys(numbers, empty),
        decimal=decimal,
        **exactly(),
    )
    # pandas takes the first cells for an index, if lines have one too many, and the names for a row
    # too, if a bare CR and a blank follow.
    if not isinstance(rows.index, pd.RangeIndex) or rows[:1].astype(str).values.tolist() == [names]:
        return read().iloc[1:]
    # pandas makes truth values of words, and of text with numbers in it both.
    inexact = [i for i in numbers if rows[i].dtype.kind not in "iuf" or rows[i].abs().max() > EXACT]
    if inexact:
        rows[inexact] = read(header=0, names=columns, usecols=inexact)
    return rows


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


def _workbook(path: Path, sheet: str | None) -> pd.DataFrame:
    """A sheet of a file of Excel, by default the only one that is not empty. Cells have their
    types; those of formulas have the values that Excel saved."""
    extras.require(extras.EXCEL, "openpyxl")
    import openpyxl
    import pandas as pd

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of styles and other things that are no cells
            book = openpyxl.load_workbook(path, read_only=True, data_only=True)
            sheets = {
                page.title: pd.DataFrame(page.values, dtype=object) for page in book.worksheets
            }
        book.close()
    except Exception as error:  # of any kind: parsers of zipfile and XML, on damaged files
        reason = " ".join(str(error).split())
        raise UserError(f"{path}: can't be read as .xlsx ({reason[:200]}); save it again") from None
    if sheet is not None:
        rows = sheets[known(f"{path}: sheet", sheet, sheets)]
    else:
        full = {name: rows for name, rows in sheets.items() if rows.notna().any(axis=None)}
        if len(full) > 1:
            raise UserError(f"{path}: has several sheets; set `sheet`", allowed=listed([*full]))
        rows = next(iter(full.values()), pd.DataFrame([[None]]))
    rows = rows.dropna(how="all").dropna(axis=1, how="all")
    names = rows.iloc[:1].fillna("").to_numpy().ravel() if len(rows) else [""]
    frame = rows.iloc[1:]
    frame.columns = pd.Index([*map(str, names)])
    return frame
