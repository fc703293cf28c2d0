"""A user's own table: rows of numbers and categories with a label, from CSV, parquet or memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from fedml_noniid.plugins.core.errors import UserError, shown
from fedml_noniid.plugins.core.options import check_options
from fedml_noniid.plugins.data.checks import known
from fedml_noniid.plugins.data.dataset import Raw
from fedml_noniid.plugins.data.readers import user_data
from fedml_noniid.plugins.data.readers.frames import (
    Cells,
    ColumnError,
    Table,
    UndecidedError,
    Who,
    cells_of,
    columns_of,
    complete,
    is_missing,
    numbers_of,
    rows_of,
    tables_of,
    used_columns,
)

if TYPE_CHECKING:  # see frames.py
    import pandas as pd

MAX_CATEGORIES = 1000  # of one column
ROWS = "\0rows"  # among the cells of columns: the numbers of the rows
Missing = Literal["median", "mode", "drop"]
MAX_NAMED = 40  # features that the note names


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
) -> Raw:
    """<root>/<file>: a table with one row per sample, .csv or .csv.gz (commas, UTF-8, names first)
    or .parquet.

    `label`: the column of the class, text or whole numbers. `target` in its place: the column of a
    number, or several columns, of numbers or of labels as 0 and 1. `owner`: the column of the
    client, for the partitions `natural` and `natural_grouped`. `features`: the columns of numbers,
    by default all that have no other use; x is [n, features] float32 with the unit 1, in their
    order.
    `one_hot`: columns of categories; in place of each come columns of 0 and 1, one for each
    category of the training rows, sorted. A category that only test rows have is 0 in all of them.
    `drop`: columns that are not used. `missing`: what becomes of cells without a value. `median`,
    `mode` fill a feature by its training rows (categories by their mode), and leave rows out that
    have no label, target or owner. `drop` leaves out every row without a value in a column that is
    used. By default they are refused. `normalise: channel` standardises each column by the training
    rows.

    The test set is <root>/<test_file>, or else the share `test_share` (0.2) of the rows, see
    `user_data.cut`. Raises UserError for missing and damaged files, and for columns and values that
    don't fit; it names the row, counted from 1 below the names.
    """
    tables = tables_of(root, file, test_file)
    targets = _targets(label, target)
    used = used_columns(tables, label=label, owner=owner)
    used |= dict.fromkeys(columns_of(tables, "target", targets, used), "target")
    chosen, categories = _chosen(tables, used, features, one_hot, drop)
    who = Who(label, owner, tuple(targets))
    rows, cells, notes = _read(tables, who, chosen, categories, missing, test_share)
    name = tables[0].name
    columns: list[str] = []
    blocks: list[list[Cells]] = [[], []]
    for column in chosen:
        whole = cells[column][0]
        parts = [whole[rows.train], cells[column][-1][rows.test]]
        notes += _fill(name, column, parts, missing)
        if column in categories:
            names, parts, more = _one_hot(name, column, parts)
            columns += names
            notes += more
        else:
            columns.append(column)
            parts = [part[:, None] for part in parts]
            if (whole == np.rint(whole)).all() and len(np.unique(whole)) == len(whole):
                notes.append(
                    f"column {column!r} has another whole number in every row; leave out an "
                    "identifier"
                )
        for block, part in zip(blocks, parts, strict=True):
            block.append(part.astype(np.float32))
    xs = [torch.from_numpy(np.concatenate(block, axis=1)) for block in blocks]
    constant = [columns[i] for i in (xs[0] == xs[0][0]).all(0).nonzero().flatten().tolist()]
    if len(constant) == len(columns):
        raise UserError(
            f"{name}: every feature is constant in the training rows: {user_data.listed(constant)}"
        )
    if constant:
        listed = user_data.listed(constant)
        notes.append(f"features that are constant in the training rows: {listed}")
    order = f"{len(columns)} features, in this order: {user_data.listed(columns, MAX_NAMED)}"
    return rows.raw(xs, 1.0, [order], notes)


def of_frame(frame: pd.DataFrame, test: pd.DataFrame | None = None, **options: Any) -> Raw:
    """As `table` with its options, of tables in memory: `test` is the test set, or else a share of
    `frame` is.

    UserError as there, and for wrong options.
    """
    check_options(table, {"file": "", **options})
    sources: Any = {"file": frame, "test_file": test}
    return table(Path(), **sources, **options)


def _targets(label: str | None, target: str | Sequence[str] | None) -> list[str]:
    """The columns of targets. UserError unless there is either a label or a target."""
    found = [target] if isinstance(target, str) else list(target or ())
    if label is None and not found:
        raise UserError(
            "label is missing", allowed="the column of the class, or `target`: columns of numbers"
        )
    if label is not None and found:
        raise UserError(
            f"label = {shown(label)} is refused with target = {shown(target)}",
            allowed="one of them: the column of the class, or the columns of numbers",
        )
    return found


def _chosen(
    tables: Sequence[Table],
    used: dict[str, str],
    features: Sequence[str] | None,
    one_hot: Sequence[str] | None,
    drop: Sequence[str] | None,
) -> tuple[list[str], list[str]]:
    """(the columns of the features, those among them that are categories).

    UserError for lists that don't fit.
    """
    if drop is not None:
        dropped = columns_of(tables[:1], "drop", drop, used)
        used = used | dict.fromkeys(dropped, "column that is dropped")
    categories: list[str] = []
    if one_hot is not None:
        categories = columns_of(tables[:1], "one_hot", one_hot, used)
    if features is None:
        chosen = [column for column in tables[0].frame.columns if column not in used]
    else:
        numbers = columns_of(tables[:1], "features", features, used)
        chosen = list(dict.fromkeys([*numbers, *categories]))
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
    who: Who,
    chosen: list[str],
    categories: list[str],
    policy: str | None,
    test_share: float | None,
) -> tuple[user_data.Rows, dict[str, list[Cells]], list[str]]:
    """(rows, cells of each column by table, notes), of the rows that are used.

    UndecidedError names all columns.
    """
    kinds: dict[str, Callable[[Table, str], Cells]]
    kinds = {column: cells_of for column in (who.label, who.owner) if column is not None}
    kinds |= dict.fromkeys(who.targets, numbers_of)
    kinds |= dict.fromkeys(chosen, numbers_of) | dict.fromkeys(categories, cells_of)
    cells: dict[str, list[Cells]] = {}
    errors: list[UserError] = []
    todo = list(kinds.items())
    for column, read in todo:
        try:
            cells[column] = [read(table, column) for table in tables]
            for table, found in zip(tables, cells[column], strict=True) if policy is None else ():
                complete(table, column, found)
        except UserError as error:
            errors.append(error)
            if isinstance(error, ColumnError) and error.option == "one_hot":
                todo.append((column, cells_of))  # as categories, may it have empty cells?
    notes: list[str] = []
    if policy is not None:
        needed = [column for column in cells if policy == "drop" or column in who.columns]
        cells[ROWS] = [np.arange(len(table.frame)) for table in tables]
        tables, notes = _without_holes(tables, cells, needed)
    bad = {error.column for error in errors if isinstance(error, ColumnError)}
    if all(column in cells and column not in bad for column in who.columns):
        try:
            rows = rows_of(tables, who, test_share)
            if ROWS in cells:
                rows = rows._replace(source=cells[ROWS][0][rows.train])
        except UserError as error:
            errors.insert(0, error)
    if errors:
        raise UndecidedError(errors)
    return rows, cells, notes


def _without_holes(
    tables: list[Table], cells: dict[str, list[Cells]], needed: list[str]
) -> tuple[list[Table], list[str]]:
    """The tables without rows that have no value in a `needed` column, and a note on each.

    `cells` change in place.
    """
    found, notes = [], []
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
            cells[column][i] = cells[column][i][full]
        found.append(table._replace(frame=table.frame[full].reset_index(drop=True)))
    return found, notes


def _fill(name: str, column: str, parts: list[Cells], policy: str | None) -> list[str]:
    """Fills missing cells of both parts in place, by the training rows; a note if there are any."""
    missing = [is_missing(part) for part in parts]
    count = int(sum(part.sum() for part in missing))
    if not count:
        return []
    there = parts[0][~missing[0]]
    if not len(there):
        problem = "has no value in any training row; leave it out (`drop`)"
        raise ColumnError(name, column, problem)
    if policy == "median" and there.dtype.kind == "f":
        how, value = "median", float(np.median(there))
    else:
        values, times = np.unique(there, return_counts=True)
        how, value = "most frequent value", values[times.argmax()]
    for part, holes in zip(parts, missing, strict=True):
        part[holes] = value
    shown = f"{value:g}" if isinstance(value, float) else value
    return [
        f"column {column!r}: {count} cells without a value are filled with the {how} of the "
        f"training rows of all clients together, {shown}"
    ]


def _one_hot(
    table: str, column: str, parts: list[Cells]
) -> tuple[list[str], list[Cells], list[str]]:
    """(`column=category` for each category of the training rows, their columns for training and
    test rows, notes)."""
    names = sorted(set(parts[0]))
    if len(names) > MAX_CATEGORIES:
        problem = f"has {len(names)} categories; allowed: at most {MAX_CATEGORIES}"
        raise ColumnError(table, column, f"{problem}; is it an identifier?")
    blocks = [part[:, None] == np.array(names, dtype=object) for part in parts]
    notes = []
    if unseen := sorted(set(parts[1]) - set(names)):
        lost = int((~blocks[1].any(1)).sum())
        notes.append(
            f"column {column!r}: {lost} test samples have categories that training lacks: "
            f"{user_data.listed(unseen)}"
        )
    return [f"{column}={name}" for name in names], blocks, notes
