"""A user's own table: rows of numbers and categories with a label, from CSV, parquet or memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedml_noniid.core.errors import UserError, shown
from fedml_noniid.core.options import check_options
from fedml_noniid.data.checks import known
from fedml_noniid.data.dataset import Raw
from fedml_noniid.data.precision import narrowed
from fedml_noniid.data.readers import user_data
from fedml_noniid.data.readers.frames import (
    NAMELESS,
    Cells,
    ColumnError,
    Marks,
    Table,
    UndecidedError,
    columns_of,
    complete,
    is_missing,
    listed,
    numbers_of,
    rows_of,
    table_of,
    taken,
    texts_of,
    used_columns,
    without_owners,
)
from fedml_noniid.data.readers.table_files import (
    Decimal,
    Dialect,
    Encoding,
    Separator,
    reading_notes,
    tables_of,
)
from fedml_noniid.data.readers.user_data import Labels
from fedml_noniid.data.types import Floats

if TYPE_CHECKING:  # see frames.py
    import pandas as pd

MAX_CATEGORIES = 1000  # of one column
Missing = Literal["median", "mode", "category", "drop"]
MAX_NAMED = 40  # features that the note names
MAX_SHOWN = 5  # of them in a terminal
IN_ORDER = " features, in this order: "


class Feature(NamedTuple):
    """Turns a column into one feature or several, as the training rows have decided."""

    column: str
    fill: Any  # in place of a cell without a value; None: such cells are refused
    categories: list[str] | None  # None: numbers

    def block(self, cells: Cells) -> Floats:
        """The features [n, k] of the cells [n]: float64, or float32 of categories."""
        if isinstance(cells, Labels):
            names = self.categories or []
            position = Labels([text or self.fill for text in cells.texts], cells.number).among(
                names
            )
            columns: Floats = (position[:, None] == np.arange(len(names))).astype(np.float32)
            return columns
        if self.fill is not None:
            cells = np.where(is_missing(cells), self.fill, cells)
        return cells[:, None]


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
    label, owner, target = (options[key] for key in ("label", "owner", "target"))
    features, one_hot, drop = (options[key] for key in ("features", "one_hot", "drop"))
    missing, na = options["missing"], options["na"] or ()
    texts = {label, owner, *(one_hot or ()), *(drop or ())}
    numbers = None if features is None else {*features, *listed(target)}
    tables = tables_of(
        *(options["root"], options["file"], options["test_file"]),
        Dialect(*(options[key] for key in Dialect._fields)),
        lambda name: name not in texts and (numbers is None or name in numbers),
        na,
    )
    used = used_columns(tables, label=label, owner=owner, target=target)
    tables, apart = without_owners(tables, owner, unseen) if unseen else (tables, None)
    chosen, categories = _chosen(tables, used, features, one_hot, drop)
    rows, cells, notes = _read(tables, used, chosen, categories, missing, options["test_share"])
    name = tables[0].name
    notes += user_data.alike("columns", [*tables[0].frame.columns])
    columns: list[str] = []
    made: list[Feature] = []
    types: list[Any] = []
    for column in chosen:
        whole = cells[column][0]
        parts = [taken(whole, rows.train), taken(cells[column][-1], rows.test)]
        fill, more = _fill(name, column, parts, missing)
        notes += more
        names = None
        if isinstance(whole, Labels):
            names, more = _one_hot(name, column, parts, missing == "category")
            columns += [f"{column}={category or '(missing)'}" for category in names]
            notes += more
        else:
            columns.append(column)
            if (whole == np.rint(whole)).all() and len(np.unique(whole)) == len(whole):
                notes.append(
                    f"column {column!r} has another whole number in every row; leave out an "
                    "identifier"
                )
        made.append(Feature(column, fill, names))
        types.append(narrowed(made[-1].block(parts[0])).dtype)
    # All columns have the type that one of them needs, as new samples will.
    kind = np.result_type(*types)
    xs = [
        torch.from_numpy(
            np.concatenate(
                [
                    feature.block(taken(cells[feature.column][i], part)).astype(kind)
                    for feature in made
                ],
                axis=1,
            )
        )
        for i, part in ((0, rows.train), (-1, rows.test))
    ]
    constant = [columns[i] for i in (xs[0] == xs[0][0]).all(0).nonzero().flatten().tolist()]
    if len(constant) == len(columns):
        raise UserError(
            f"{name}: every feature is constant in the training rows: {user_data.listed(constant)}"
        )
    if constant:
        notes.append(
            f"features that are constant in the training rows: {user_data.listed(constant)}"
        )
    order = f"{len(columns)}{IN_ORDER}{user_data.listed(columns, MAX_NAMED)}"
    raw = rows.raw(xs, 1.0, [*reading_notes(tables), order], notes)
    raw = replace(raw, encode=partial(_encoded, made, na, tables[0].marks), features=columns)
    return raw if apart is None else _with_unseen(raw, apart, made, options, unseen)


def _with_unseen(
    raw: Raw,
    table: Table,
    features: Sequence[Feature],
    options: Mapping[str, Any],
    names: Sequence[str],
) -> Raw:
    """The data set with the samples of the owners `names` apart: the rows of `table`, without
    those that `missing` leaves out."""
    columns: dict[str, Callable[[Table, str], Cells]] = {}
    columns |= dict.fromkeys([options["label"], options["owner"]], texts_of)
    for feature in features if options["missing"] == "drop" else ():
        columns[feature.column] = numbers_of if feature.categories is None else texts_of
    cells = {column: read(table, column) for column, read in columns.items()}
    full = ~np.any([is_missing(column) for column in cells.values()], axis=0)
    x = _encoded(features, (), table.marks, table.frame[full])
    assert x is not None, "a frame is encoded"
    label, owner = (taken(cells[options[key]], full) for key in ("label", "owner"))
    return user_data.with_unseen(raw, x, label, owner, names)


def in_brief(note: str) -> str:
    """A note of a data set for the terminal: a long list of features is cut."""
    number, order, names = note.partition(IN_ORDER)
    columns = names.split(", ")
    is_long = bool(order) and len(columns) > MAX_SHOWN
    return f"{number} features: {', '.join(columns[: MAX_SHOWN - 2])}, ..." if is_long else note


def _encoded(
    features: Sequence[Feature], na: Sequence[str], marks: Marks | None, x: object
) -> Tensor | None:
    """The samples [n, d] of new rows, which need the columns of the features alone, by name.

    Cells of text have the `marks` of the training file. None for what is no data frame. UserError
    for columns and values that don't fit.
    """
    import pandas as pd

    if not isinstance(x, pd.DataFrame):
        return None
    table, blocks = table_of("x", x.mask(x.isin([*na])))._replace(marks=marks), []
    for feature in features:
        known("x: column", feature.column, table.frame.columns)
        cells = (numbers_of if feature.categories is None else texts_of)(table, feature.column)
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


def _chosen(
    tables: Sequence[Table],
    used: Mapping[str, str],
    features: Sequence[str] | None,
    one_hot: Sequence[str] | None,
    drop: Sequence[str] | None,
) -> tuple[list[str], list[str]]:
    """(the columns of the features, those among them that are categories).

    UserError for lists that don't fit.
    """
    dropped = columns_of(tables[:1], "drop", drop, used)
    used = {**used, **dict.fromkeys(dropped, "column that is dropped")}
    categories = columns_of(tables[:1], "one_hot", one_hot, used)
    chosen = columns_of(tables[:1], "features", features, used)
    chosen = list(dict.fromkeys([*chosen, *categories]))
    if features is None:
        chosen = [column for column in tables[0].frame.columns if column not in used]
    if not chosen:
        raise UserError(
            f"{tables[0].name}: no column is left for the features; used: {', '.join(used)}"
        )
    for column in chosen:
        for table in tables[1:]:
            known(f"{table.name}: column", column, table.frame.columns)
    return chosen, categories


def _read(
    tables: list[Table],
    used: Mapping[str, str],
    chosen: list[str],
    categories: list[str],
    policy: str | None,
    test_share: float | None,
) -> tuple[user_data.Rows, dict[str, list[Cells]], list[str]]:
    """(rows, cells of each column by table, notes), of the rows that are used.

    UndecidedError names all columns.
    """
    cells: dict[str, list[Cells]] = {}
    errors: list[UserError] = []
    texts = {*categories, *(column for column, option in used.items() if option != "target")}
    todo = [*dict.fromkeys([*used, *chosen])]
    for column in todo:
        read: Callable[[Table, str], Cells] = texts_of if column in texts else numbers_of
        try:
            cells[column] = [read(table, column) for table in tables]
            for table, values in zip(tables, cells[column], strict=True) if policy is None else ():
                advised = ("missing", "drop") if column in chosen else ("missing",)
                complete(table, column, values, advised)
        except UserError as error:
            errors.append(error)
            if isinstance(error, ColumnError) and error.option == "one_hot":
                texts.add(column)
                todo.append(column)  # as categories, may it have empty cells?
    notes: list[str] = []
    needed = [column for column in cells if policy == "drop" or column in used]
    if policy is not None and needed:
        notes = _without_holes(tables, cells, needed)
    bad = {error.column for error in errors if isinstance(error, ColumnError)}
    if all(column in cells and column not in bad for column in used):
        try:
            rows = rows_of([table.name for table in tables], used, cells, test_share)
        except UserError as error:
            errors.insert(0, error)
    if errors:
        raise UndecidedError(errors)
    return rows, cells, notes


def _without_holes(
    tables: list[Table], cells: dict[str, list[Cells]], needed: list[str]
) -> list[str]:
    """Leaves the rows out of `cells` that have no value in a `needed` column; a note on each
    table."""
    notes = []
    for i, table in enumerate(tables):
        full = ~np.any([is_missing(cells[column][i]) for column in needed], axis=0)
        if not full.any():
            raise UserError(
                f"{table.name}: no row has a value in every column; name empty columns in drop"
            )
        if not full.all():
            notes.append(
                f"{table.name}: {(~full).sum()} of {len(full)} rows are left out, as a column that "
                "is needed has no value there"
            )
        for column in cells:
            cells[column][i] = taken(cells[column][i], full)
    return notes


def _fill(name: str, column: str, parts: list[Cells], policy: str | None) -> tuple[Any, list[str]]:
    """What a missing cell of a column is filled with, by the training rows, and a note if there is
    one in the cells of both `parts`. None if there can't be one: it is refused or left out."""
    if policy not in ("median", "mode", "category"):
        return None, []
    missing = [is_missing(part) for part in parts]
    if missing[0].all():
        raise ColumnError(name, column, "has no value in any training row; leave it out (`drop`)")
    there, count = taken(parts[0], ~missing[0]), int(sum(part.sum() for part in missing))
    value: Any
    how = "most frequent value"
    if isinstance(there, Labels):
        if policy == "category":
            note = f"column {column!r}: {count} cells without a value are a category of their own"
            return NAMELESS, [note] * (count > 0)
        value = min(zip(-np.bincount(there.number), there.texts, strict=True))[1]
    elif policy == "mode":
        values, times = np.unique(there, return_counts=True)
        value = values[times.argmax()]
    else:
        how, value = "median", float(np.median(there))
    shown = f"{value:g}" if isinstance(value, float) else value
    note = (
        f"column {column!r}: {count} cells without a value are filled with the {how} of the "
        f"training rows of all clients together, {shown}"
    )
    return value, [note] * (count > 0)


def _one_hot(
    table: str, column: str, parts: Sequence[Any], nameless: bool
) -> tuple[list[str], list[str]]:
    """(the categories of the training rows, notes) of the cells of training and test rows.

    `nameless`: whether a missing one is a category.
    """
    train, test = ({*part.texts} - (set() if nameless else {NAMELESS}) for part in parts)
    names = sorted(train)
    notes = user_data.alike(f"column {column!r}: categories", sorted(train | test))
    if len(names) > MAX_CATEGORIES:
        allowed = f"allowed: at most {MAX_CATEGORIES}; is it an identifier?"
        raise ColumnError(table, column, f"has {len(names)} categories; {allowed}")
    if unseen := sorted(test - train):
        lost = np.count_nonzero(parts[1].among(unseen) >= 0)
        notes.append(
            f"column {column!r}: {lost} test samples have categories that training lacks: "
            f"{user_data.listed(unseen)}"
        )
    return names, notes
