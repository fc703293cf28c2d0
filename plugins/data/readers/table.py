"""A user's own table: rows of numbers and categories with a label, from CSV, parquet or memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.checks import known, refusal
from fedml_noniid.plugins.data.dataset import Raw
from fedml_noniid.plugins.data.readers import user_data
from fedml_noniid.plugins.data.readers.frames import (
    ColumnError,
    Parted,
    Table,
    UndecidedError,
    cells_of,
    check_columns,
    complete,
    from_files,
    in_memory,
    is_missing,
    labels_of,
    numbers_of,
    parted,
)

if TYPE_CHECKING:  # see frames.py
    import pandas as pd

MOST_CATEGORIES = 1000  # of one column
MISSING = ("median", "mode", "drop")
NAMED = 40  # features that the note names


class Options(NamedTuple):
    """The options of `table` about its features, not yet checked."""

    features: object
    one_hot: object
    drop: object
    missing: object


def table(
    root: Path,
    *,
    file: str,
    label: str,
    test_file: str | None = None,
    test_share: float | None = None,
    owner: str | None = None,
    features: list[str] | None = None,
    one_hot: list[str] | None = None,
    drop: list[str] | None = None,
    missing: str | None = None,
) -> Raw:
    """<root>/<file>: a table with one row per sample, .csv or .csv.gz (commas, UTF-8, names first)
    or .parquet.

    `label`: the column of the class, text or whole numbers. `owner`: the column of the client, for
    the partitions `natural` and `natural_grouped`. `features`: the columns of numbers, by default
    all that have no other use; x is [n, features] float32 with the unit 1, in their order.
    `one_hot`: columns of categories; in place of each come columns of 0 and 1, one for each
    category of the training rows, sorted. A category that only test rows have is 0 in all of them.
    `drop`: columns that are not used. `missing`: what becomes of cells without a value. `median`,
    `mode` fill a feature by its training rows (categories by their mode), and leave rows out that
    have no label or owner. `drop` leaves out every row without a value in a column that is used. By
    default they are refused. `normalise: channel` standardises each column by the training rows.

    The test set is <root>/<test_file>, or else the share `test_share` (0.2) of the rows, see
    `user_data.cut`. Raises UserError for missing and damaged files, and for columns and values that
    don't fit; it names the row, counted from 1 below the names.
    """
    return _raw(
        from_files(root, file, test_file),
        label,
        owner,
        Options(features, one_hot, drop, missing),
        test_share,
    )


def of_frame(
    frame: pd.DataFrame,
    test: pd.DataFrame | None = None,
    *,
    label: str,
    owner: str | None = None,
    features: Sequence[str] | None = None,
    one_hot: Sequence[str] | None = None,
    drop: Sequence[str] | None = None,
    missing: str | None = None,
    test_share: float | None = None,
) -> Raw:
    """As `table`, of tables in memory: `test` is the test set, or else a share of `frame` is.

    UserError as there.
    """
    return _raw(
        in_memory(frame, test), label, owner, Options(features, one_hot, drop, missing), test_share
    )


def _raw(
    tables: list[Table], label: str, owner: str | None, options: Options, test_share: object
) -> Raw:
    check_columns(tables, label=label, owner=owner)
    policy = None if options.missing is None else known("missing", options.missing, MISSING)
    chosen, categories = _chosen(tables, label, owner, options)
    tables, rows, cells, notes = _read(
        tables, (label, owner), chosen, categories, policy, test_share
    )
    columns: list[str] = []
    blocks: tuple[list[NDArray[Any]], list[NDArray[Any]]] = ([], [])
    for column in chosen:
        parts = cells[column][0][rows.train], cells[column][-1][rows.test]
        notes += _filled(tables[0].name, column, parts, policy)
        if column in categories:
            names, block, said = _one_hot(tables[0].name, column, *parts)
            notes += said
        else:
            names, block, whole = [column], (parts[0][:, None], parts[1][:, None]), cells[column][0]
            if (whole == np.rint(whole)).all() and len(np.unique(whole)) == len(whole):
                notes.append(
                    f"column {column!r} has another whole number in every row; leave out an "
                    "identifier"
                )
        columns += names
        for part, values in zip(blocks, block, strict=True):
            part.append(values.astype(np.float32))
    train_x, test_x = (torch.from_numpy(np.concatenate(part, axis=1)) for part in blocks)
    constant = (train_x == train_x[0]).all(0).tolist()
    same = [name for name, is_same in zip(columns, constant, strict=True) if is_same]
    if len(same) == len(columns):
        raise UserError(
            f"{tables[0].name}: every feature is constant in the training rows: "
            f"{user_data.listed(same)}"
        )
    if same:
        notes.append(f"features that are constant in the training rows: {user_data.listed(same)}")
    notes = [
        f"{len(columns)} features, in this order: {user_data.listed(columns, NAMED)}",
        *rows.notes,
        *notes,
    ]
    return Raw(
        train_x,
        rows.train_y,
        test_x,
        rows.test_y,
        rows.classes,
        1.0,
        rows.train_owner,
        rows.test_owner,
        notes=notes + user_data.repeated(train_x, test_x),
    )


def _chosen(
    tables: Sequence[Table], label: str, owner: str | None, options: Options
) -> tuple[list[str], list[str]]:
    """(the columns of the features, those among them that are categories).

    UserError for lists that don't fit.
    """
    used = {
        column: key for key, column in (("label", label), ("owner", owner)) if column is not None
    }
    if options.drop is not None:
        used |= dict.fromkeys(_listed(tables, "drop", options.drop, used), "column that is dropped")
    categories = (
        _listed(tables, "one_hot", options.one_hot, used) if options.one_hot is not None else []
    )
    if options.features is None:
        chosen = [column for column in tables[0].frame.columns if column not in used]
    else:
        chosen = list(
            dict.fromkeys([*_listed(tables, "features", options.features, used), *categories])
        )
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
    who: tuple[str, str | None],
    chosen: list[str],
    categories: list[str],
    policy: str | None,
    test_share: object,
) -> tuple[list[Table], Parted, dict[str, list[NDArray[Any]]], list[str]]:
    """(tables, parts, column -> cells by table, notes), of the rows that are used.

    UndecidedError names all columns.
    """
    label, owner = who
    errors: list[UserError] = []
    cells: dict[str, list[NDArray[Any]]] = {}
    kinds: dict[str, Callable[[Table, str], Any]] = dict.fromkeys(chosen, numbers_of)
    first: dict[str, Callable[[Table, str], Any]] = {label: labels_of}
    first |= {} if owner is None else {owner: cells_of}
    kinds = first | kinds | dict.fromkeys(categories, cells_of)
    todo = list(kinds.items())
    for column, read in todo:
        try:
            cells[column] = [_array(read(table, column)) for table in tables]
            for table, found in zip(tables, cells[column], strict=True) if policy is None else ():
                complete(table, column, is_missing(found))
        except UserError as error:
            errors.append(error)
            if isinstance(error, ColumnError) and error.option == "one_hot":
                todo.append((column, cells_of))  # as categories, may it have empty cells?
    needed = [column for column in cells if policy == "drop" or column in who]
    kept = [np.ones(len(table.frame), dtype=bool) for table in tables]
    for column in needed if policy is not None else ():
        for keep, found in zip(kept, cells[column], strict=True):
            keep &= ~is_missing(found)
    notes = [
        (
            f"{table.name}: {lost} of {len(keep)} rows are left out, as a column that is needed "
            "has "
            "no value there"
        )
        for table, keep in zip(tables, kept, strict=True)
        if (lost := int((~keep).sum()))
    ]
    for table, keep in zip(tables, kept, strict=True):
        if not keep.any():
            raise UserError(
                f"{table.name}: no row has a value in every column; name empty columns in drop"
            )
    tables = [
        table._replace(frame=table.frame[keep].reset_index(drop=True))
        for table, keep in zip(tables, kept, strict=True)
    ]
    cells = {
        column: [part[keep] for part, keep in zip(found, kept, strict=True)]
        for column, found in cells.items()
    }
    bad = {error.column for error in errors if isinstance(error, ColumnError)}
    if all(column in cells and column not in bad for column in who if column is not None):
        try:
            rows = parted(tables, label, owner, test_share)
        except UserError as error:
            errors.insert(0, error)
    if errors:
        raise UndecidedError(errors)
    return tables, rows, cells, notes


def _array(cells: Any) -> NDArray[Any]:
    return cells if isinstance(cells, np.ndarray) else np.array(cells, dtype=object)


def _filled(
    name: str, column: str, parts: tuple[NDArray[Any], NDArray[Any]], policy: str | None
) -> list[str]:
    """Fills missing cells of both parts in place, by the training rows; a note if there are any."""
    missing = [is_missing(part.tolist()) for part in parts]
    count = int(sum(part.sum() for part in missing))
    if not count:
        return []
    there = parts[0][~missing[0]]
    if not len(there):
        raise ColumnError(
            f"{name}: column {column!r} has no value in any training row; leave it out (`drop`)",
            column,
            "drop",
        )
    if policy == "median" and there.dtype.kind == "f":
        how, value = "median", float(np.median(there))
    else:
        values, times = np.unique(there, return_counts=True)
        how, value = "most frequent value", values[times.argmax()]
    for part, holes in zip(parts, missing, strict=True):
        part[holes] = value
    shown = f"{value:g}" if isinstance(value, float) else value
    of = "of the training rows of all clients together"
    return [
        f"column {column!r}: {count} cells without a value are filled with the {how} {of}, {shown}"
    ]


def _listed(tables: Sequence[Table], key: str, columns: object, used: dict[str, str]) -> list[str]:
    """The columns that an option lists.

    UserError unless all are there, once, and without another use.
    """
    if isinstance(columns, str) or not isinstance(columns, Sequence) or not columns:
        raise refusal(key, columns, "a list of columns")
    found: list[str] = []
    for column in columns:
        known(f"{tables[0].name}: {key}: column", column, tables[0].frame.columns)
        if column in used:
            raise refusal(key, column, f"columns that aren't the {used[column]}")
        if column in found:
            raise refusal(key, column, "each column once")
        found.append(column)
    return found


def _one_hot(
    table: str, column: str, own_values: NDArray[Any], test_values: NDArray[Any]
) -> tuple[list[str], tuple[NDArray[Any], NDArray[Any]], list[str]]:
    """(`column=category` for each category of the training rows, their columns for training and
    test rows, notes)."""
    names = sorted(set(own_values))
    if len(names) > MOST_CATEGORIES:
        most = f"at most {MOST_CATEGORIES}; is it an identifier?"
        message = f"{table}: column {column!r} has {len(names)} categories; allowed: {most}"
        raise ColumnError(message, column, "drop")
    blocks = tuple(
        (part[:, None] == np.array(names, dtype=object)).astype(bool)
        for part in (own_values, test_values)
    )
    unseen = sorted(set(test_values) - set(names))
    lost = int((~blocks[1].any(1)).sum())
    said = [
        (
            f"column {column!r}: {lost} test samples have categories that training lacks: "
            f"{user_data.listed(unseen)}"
        )
    ]
    return [f"{column}={name}" for name in names], (blocks[0], blocks[1]), said if unseen else []
