"""A user's own table: rows of numbers and categories with a label, from CSV, parquet or memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedml_noniid.core.errors import UserError, shown
from fedml_noniid.core.options import check_options
from fedml_noniid.data.checks import known
from fedml_noniid.data.dataset import Raw
from fedml_noniid.data.precision import narrowed
from fedml_noniid.data.readers import user_data
from fedml_noniid.data.readers.frames import (
    Cells,
    ColumnError,
    Dialect,
    Table,
    UndecidedError,
    check_columns,
    columns_of,
    complete,
    listed,
    numbers_of,
    rows_of,
    table_of,
    texts_of,
    used_columns,
)
from fedml_noniid.data.readers.table_files import (
    Decimal,
    Encoding,
    Separator,
    reading_notes,
    tables_of,
)

if TYPE_CHECKING:  # see frames.py
    import pandas as pd

MAX_CATEGORIES = 1000  # of one column
Missing = Literal["median", "mode", "category", "drop"]
TEXTS = ("label", "owner", "drop", "one_hot")  # options whose columns are no numbers
NAMELESS = ""  # the category of missing cells, with `missing: category`
MAX_NAMED = 40  # features that the note names
MAX_SHOWN = 5  # of them in a terminal
IN_ORDER = " features, in this order: "


class Feature(NamedTuple):
    """Turns a column into one feature or several, as the training rows have decided."""

    column: str
    fill: Any  # in place of a cell without a value; None: such cells are refused
    categories: list[str] | None  # None: numbers

    @property
    def names(self) -> list[str]:
        """The names of the features."""
        if self.categories is None:
            return [self.column]
        return [f"{self.column}={category or '(missing)'}" for category in self.categories]

    def read(self, table: Table) -> Cells:
        """The cells of the column in a table. UserError."""
        return (numbers_of if self.categories is None else texts_of)(table, self.column)

    def block(self, cells: Cells) -> NDArray[Any]:
        """The features [n, k] of the cells [n]: float64, or float32 of categories."""
        if self.fill is not None:
            cells = _filled(cells, self.fill)
        if self.categories is None:
            return cells.reshape(-1, 1)  # type: ignore[no-any-return]  # untyped in pandas
        number = user_data.positions(cells, self.categories)[:, None]
        columns: NDArray[Any] = number == np.arange(len(self.categories))
        return columns.astype(np.float32)


def _filled(cells: Cells, value: Any) -> Cells:
    """The cells with a value in place of the missing ones."""
    if isinstance(cells, np.ndarray):
        return np.where(np.isnan(cells), value, cells)
    filled: Cells = cells.set_categories(sorted({*cells.categories, value})).fillna(value)
    return filled


def table(
    root: Path,
    *,
    file: str,
    label: str | None = None,
    target: str | list[str] | None = None,
    test_file: str | None = None,
    test_share: user_data.Share | None = None,
    owner: str | None = None,
    features: list[str] | None = None,
    one_hot: list[str] | None = None,
    drop: list[str] | None = None,
    missing: Missing | None = None,
    na: list[str] | None = None,
    separator: Separator | None = None,
    decimal: Decimal | None = None,
    encoding: Encoding | None = None,
    sheet: str | None = None,
) -> Raw:
    """<root>/<file>: a table with one row per sample and the names first, .csv, .csv.gz, .xlsx or
    .parquet.

    `separator`, `decimal` and `encoding` are those of a CSV. By default the first rows show the
    separator, all numbers the mark of their decimals (commas: a point), and the encoding is UTF-8.
    A note says what was read; where two readings are possible, it is refused. `sheet`: of an .xlsx
    with several.

    `label`: the column of the class, text or whole numbers. `target` in its place: the column of a
    number, or several columns, of numbers or of labels as 0 and 1. `owner`: the column of the
    client, for the partitions `natural` and `natural_grouped`. `features`: the columns of numbers,
    by default all that have no other use; x is [n, features] float32 with the unit 1, in their
    order.
    `one_hot`: columns of categories; in place of each come columns of 0 and 1, one for each
    category of the training rows, sorted. A category that only test rows have is 0 in all of them.
    `drop`: columns that are not used. `missing`: what becomes of cells without a value. `median`,
    `mode` fill a feature by its training rows (categories by their mode), and leave rows out that
    have no label, target or owner. `category`: as `median`, but a missing category is a category
    of its own. `drop` leaves out every row without a value in a column that is
    used. By default they are refused. `na`: texts of cells that count as missing. `normalise:
    channel` standardises each column by the training rows.

    The test set is <root>/<test_file>, or else the share `test_share` (0.2) of the rows, see
    `user_data.cut`. Raises UserError for missing and damaged files, and for columns and values that
    don't fit; it names the row, counted from 1 below the names.
    """
    options = locals()
    if label is None and not target:
        raise UserError(
            "label is missing", allowed="the column of the class, or `target`: columns of numbers"
        )
    if label is not None and target:
        raise UserError(
            f"label = {shown(label)} is refused with target = {shown(target)}",
            allowed="one of them: the column of the class, or the columns of numbers",
        )
    return replace(_made(options, ()), without=partial(_made, options))


def _made(options: Mapping[str, Any], unseen: Sequence[str]) -> Raw:
    """The data set of a table with the options of `table`, without the owners `unseen`."""
    na, policy = options["na"] or (), options["missing"]
    named = {key: options[key] for key in ("label", "owner", "target", "drop")}
    texts = {column for key in TEXTS for column in listed(options[key])}
    numbers = options["features"] and {*options["features"], *listed(options["target"])}
    tables = tables_of(
        *(options["root"], options["file"], options["test_file"]),
        Dialect(*(options[key] for key in Dialect._fields)),
        lambda name: name not in texts and (numbers is None or name in numbers),
        na,
    )
    names = [table.name for table in tables]
    used = used_columns(tables[0], **named)
    chosen, categories = _chosen(tables[0], used, options["features"], options["one_hot"])
    used = {column: option for column, option in used.items() if option != "drop"}
    check_columns(tables, [*used, *chosen])
    cells, errors = _cells(tables, used, chosen, categories, policy)
    # Those in which each row has to have a value.
    needed = [column for column in cells if policy == "drop" or column in used]
    apart: dict[str, Cells] = {}
    if unseen and not errors:
        apart, cells = user_data.apart(cells, options["owner"], unseen, names)
    rows, notes = _rows(names, used, cells, errors, needed if policy else [], options["test_share"])
    notes += user_data.alike("columns", [*tables[0].frame.columns])
    features: list[Feature] = []
    for column in chosen:
        feature, more = _feature(names[0], column, cells[column], rows, policy)
        features.append(feature)
        notes += more
    # All columns have the type that one of them needs, as new samples will.
    blocks = [
        [feature.block(cells[feature.column][i][part]) for feature in features]
        for i, part in ((0, rows.train), (-1, rows.test))
    ]
    kind = np.result_type(*(narrowed(block).dtype for block in blocks[0]))
    xs = [torch.from_numpy(np.concatenate(part, axis=1, dtype=kind)) for part in blocks]
    columns = [name for feature in features for name in feature.names]
    constant = [columns[i] for i in (xs[0] == xs[0][0]).all(0).nonzero().flatten().tolist()]
    if len(constant) == len(columns):
        raise UserError(
            f"{names[0]}: every feature is constant in the training rows: "
            f"{user_data.listed(constant)}"
        )
    if constant:
        notes.append(
            f"features that are constant in the training rows: {user_data.listed(constant)}"
        )
    order = f"{len(columns)}{IN_ORDER}{user_data.listed(columns, MAX_NAMED)}"
    raw = rows.raw(xs, 1.0, [*reading_notes(tables), order], notes)
    raw = replace(raw, encode=partial(_encoded, features, na, tables[0].csv), features=columns)
    if not unseen:
        return raw
    label, owner = apart[options["label"]], apart[options["owner"]]
    full = _full([apart[column] for column in needed])
    x = np.concatenate([feature.block(apart[feature.column][full]) for feature in features], 1)
    return user_data.with_unseen(raw, torch.from_numpy(x), label[full], owner[full], unseen)


def _full(columns: Sequence[Cells]) -> NDArray[np.bool_]:
    """Which rows have a value in each of these columns."""
    import pandas as pd

    full: NDArray[np.bool_] = ~np.any([pd.isna(cells) for cells in columns], axis=0)
    return full


def _chosen(
    table: Table,
    used: Mapping[str, str],
    features: Sequence[str] | None,
    one_hot: Sequence[str] | None,
) -> tuple[list[str], list[str]]:
    """(the columns of the features, those among them that are categories).

    UserError for lists that don't fit.
    """
    categories = columns_of(table, "one_hot", one_hot, used)
    chosen = columns_of(table, "features", features, used)
    chosen = list(dict.fromkeys([*chosen, *categories]))
    if features is None:
        chosen = [column for column in table.frame.columns if column not in used]
    if not chosen:
        raise UserError(
            f"{table.name}: no column is left for the features; used: {', '.join(used)}"
        )
    return chosen, categories


def _cells(
    tables: Sequence[Table],
    used: Mapping[str, str],
    chosen: Sequence[str],
    categories: Sequence[str],
    policy: str | None,
) -> tuple[dict[str, list[Cells]], list[UserError]]:
    """(the cells of each column by table, an error for each column that needs a decision)."""
    cells: dict[str, list[Cells]] = {}
    errors: list[UserError] = []
    texts = {*categories, *(column for column, option in used.items() if option != "target")}
    todo = [*dict.fromkeys([*used, *chosen])]
    for column in todo:
        read = texts_of if column in texts else partial(numbers_of, is_feature=column not in used)
        try:
            cells[column] = [read(table, column) for table in tables]
            for table, values in zip(tables, cells[column], strict=True) if policy is None else ():
                advised = ("missing", "drop") if column in chosen else ("missing",)
                complete(table, column, values, advised)
        except ColumnError as error:
            errors.append(error)
            if error.option == "one_hot":
                texts.add(column)
                todo.append(column)  # as categories, may it have empty cells?
    return cells, errors


def _rows(
    names: Sequence[str],
    used: Mapping[str, str],
    cells: dict[str, list[Cells]],
    errors: list[UserError],
    needed: Sequence[str],
    test_share: float | None,
) -> tuple[user_data.Rows, list[str]]:
    """(rows, notes). Leaves those rows out of `cells` that have no value in a `needed` column.

    UndecidedError names all columns.
    """
    notes = []
    for i, name in enumerate(names) if needed else ():
        full = _full([cells[column][i] for column in needed])
        if not full.any():
            raise UserError(
                f"{name}: no row has a value in every column; name empty columns in drop"
            )
        if not full.all():
            notes.append(
                f"{name}: {(~full).sum()} of {len(full)} rows are left out, as a column that "
                "is needed has no value there"
            )
        for parts in cells.values():
            parts[i] = parts[i][full]
    wrong = {error.column for error in errors if isinstance(error, ColumnError)}
    if not wrong & used.keys():
        try:
            rows = rows_of(names, used, cells, test_share)
        except UserError as error:
            errors.insert(0, error)
    if errors:
        raise UndecidedError(errors)
    return rows, notes


def _feature(
    name: str, column: str, cells: Sequence[Cells], rows: user_data.Rows, policy: str | None
) -> tuple[Feature, list[str]]:
    """(how a column becomes features, notes) by its cells in the training rows and the test rows.

    `name`: of the table. ColumnError for a column without a value, and for too many categories.
    """
    import pandas as pd

    parts, notes = [cells[0][rows.train], cells[-1][rows.test]], []
    values, is_text = parts[0][~pd.isna(parts[0])], not isinstance(parts[0], np.ndarray)
    if not len(values):
        raise ColumnError(name, column, "has no value in any training row; leave it out (`drop`)")
    fill: Any = None
    what = ""
    if policy == "category" and is_text:
        fill, what = NAMELESS, "are a category of their own"
    elif policy in ("median", "mode", "category"):
        is_mode = policy == "mode" or is_text
        how = "most frequent value" if is_mode else "median"
        fill = pd.Series(values).mode()[0] if is_mode else float(np.median(values))
        text = fill if is_text else f"{fill:g}"
        what = f"are filled with the {how} of the training rows of all clients together, {text}"
    if fill is not None and (count := sum(int(pd.isna(part).sum()) for part in parts)):
        notes.append(f"column {column!r}: {count} cells without a value {what}")
        parts = [_filled(part, fill) for part in parts]
    if not is_text:
        if (cells[0] == np.rint(cells[0])).all() and len(np.unique(cells[0])) == len(cells[0]):
            notes.append(
                f"column {column!r} has another whole number in every row; leave out an identifier"
            )
        return Feature(column, fill, None), notes
    train, test = ([*part.remove_unused_categories().categories] for part in parts)
    notes += user_data.alike(f"column {column!r}: categories", sorted({*train, *test}))
    if len(train) > MAX_CATEGORIES:
        allowed = f"allowed: at most {MAX_CATEGORIES}; is it an identifier?"
        raise ColumnError(name, column, f"has {len(train)} categories; {allowed}")
    if lacking := sorted({*test} - {*train}):
        notes.append(
            f"column {column!r}: {parts[1].isin(lacking).sum()} test samples have categories that "
            f"training lacks: {user_data.listed(lacking)}"
        )
    return Feature(column, fill, train), notes


def in_brief(note: str) -> str:
    """A note of a data set for the terminal: a long list of features is cut."""
    number, order, names = note.partition(IN_ORDER)
    columns = names.split(", ")
    is_long = bool(order) and len(columns) > MAX_SHOWN
    return f"{number} features: {', '.join(columns[: MAX_SHOWN - 2])}, ..." if is_long else note


def _encoded(
    features: Sequence[Feature], na: Sequence[str], csv: Dialect | None, x: object
) -> Tensor | None:
    """The samples [n, d] of new rows, which need the columns of the features alone, by name.

    Cells of text have the marks of the training file `csv`. None for what is no data frame.
    UserError for columns and values that don't fit.
    """
    import pandas as pd

    if not isinstance(x, pd.DataFrame):
        return None
    table, blocks = table_of("x", x.mask(x.isin([*na])))._replace(csv=csv), []
    for feature in features:
        known("x: column", feature.column, table.frame.columns)
        cells = feature.read(table)
        if feature.fill is None:
            complete(table, feature.column, cells)
        blocks.append(feature.block(cells))
    return torch.from_numpy(np.concatenate(blocks, axis=1))


def of_frame(frame: pd.DataFrame, test: pd.DataFrame | None = None, **options: Any) -> Raw:
    """As `table` with its options, of tables in memory: `test` is the test set, or else a share of
    `frame` is.

    UserError as there, and for wrong options.
    """
    check_options(table, {"file": "", **options})
    sources: Any = {"file": frame, "test_file": test}
    return table(Path(), **sources, **options)
