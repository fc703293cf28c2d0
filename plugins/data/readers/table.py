"""A user's own table: rows of numbers and categories with a label, from CSV, parquet or memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.checks import known, refusal
from fedml_noniid.plugins.data.dataset import Raw
from fedml_noniid.plugins.data.readers import own
from fedml_noniid.plugins.data.readers.frames import (
    Table,
    check_columns,
    from_files,
    in_memory,
    names_of,
    numbers_of,
    parted,
)
from fedml_noniid.plugins.data.types import Ints

if TYPE_CHECKING:  # see frames.py
    import pandas as pd

MOST_CATEGORIES = 1000  # of one column
NAMED = 40  # features that the note names


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
) -> Raw:
    """<root>/<file>: a table with one row per sample, .csv or .csv.gz (commas, UTF-8, names first) or .parquet.

    `label`: the column of the class, text or whole numbers. `owner`: the column of the client, for the partitions
    `natural` and `natural_grouped`. `features`: the columns of numbers, by default all that have no other use; x is
    [n, features] float32 with the unit 1, in their order. `one_hot`: columns of categories; in place of each come
    columns of 0 and 1, one for each category of the training rows, sorted. A category that only test rows have is 0 in
    all of them. `normalise: channel` standardises each column by the training rows.

    The test set is <root>/<test_file>, or else the share `test_share` (0.2) of the rows, see `own.cut`.
    Raises UserError for missing and damaged files, and for columns and values that don't fit; it names the row,
    counted from 1 below the names.
    """
    return _raw(from_files(root, file, test_file), label, owner, features, one_hot, test_share)


def of_frame(
    frame: pd.DataFrame,
    test: pd.DataFrame | None = None,
    *,
    label: str,
    owner: str | None = None,
    features: Sequence[str] | None = None,
    one_hot: Sequence[str] | None = None,
    test_share: float | None = None,
) -> Raw:
    """As `table`, of tables in memory: `test` is the test set, or else a share of `frame` is. UserError as there."""
    return _raw(in_memory(frame, test), label, owner, features, one_hot, test_share)


def _raw(
    tables: list[Table], label: str, owner: str | None, features: object, one_hot: object, test_share: object
) -> Raw:
    check_columns(tables, label=label, owner=owner)
    used = {column: key for key, column in (("label", label), ("owner", owner)) if column is not None}
    categories = _listed(tables, "one_hot", one_hot, used) if one_hot is not None else []
    if features is None:
        chosen = [column for column in tables[0].frame.columns if column not in used]
    else:
        chosen = list(dict.fromkeys([*_listed(tables, "features", features, used), *categories]))
    if not chosen:
        raise UserError(f"{tables[0].name}: no column is left for the features; used: {', '.join(used)}")
    for column in chosen:
        for table in tables[1:]:
            known(f"{table.name}: column", column, table.frame.columns)
    rows = parted(tables, label, owner, test_share)
    columns: list[str] = []
    blocks: tuple[list[NDArray[Any]], list[NDArray[Any]]] = ([], [])
    notes = []
    for column in chosen:
        if column in categories:
            names, block, said = _one_hot(tables, column, rows.train, rows.test)
            notes += said
        else:
            found = [numbers_of(table, column) for table in tables]
            names, block = [column], (found[0][rows.train, None], found[-1][rows.test, None])
            whole = (found[0] == np.rint(found[0])).all()
            if whole and len(np.unique(found[0])) == len(found[0]):
                notes.append(f"column {column!r} has another whole number in every row; leave out an identifier")
        columns += names
        for part, values in zip(blocks, block, strict=True):
            part.append(values.astype(np.float32))
    train_x, test_x = (torch.from_numpy(np.concatenate(part, axis=1)) for part in blocks)
    constant = (train_x == train_x[0]).all(0).tolist()
    same = [name for name, is_same in zip(columns, constant, strict=True) if is_same]
    if len(same) == len(columns):
        raise UserError(f"{tables[0].name}: every feature is constant in the training rows: {own.listed(same)}")
    if same:
        notes.append(f"features that are constant in the training rows: {own.listed(same)}")
    notes = [f"{len(columns)} features, in this order: {own.listed(columns, NAMED)}", *rows.notes, *notes]
    return Raw(
        train_x, rows.train_y, test_x, rows.test_y, rows.classes, 1.0, rows.train_owner, rows.test_owner,
        notes=notes + own.repeated(train_x, test_x),
    )  # fmt: skip


def _listed(tables: Sequence[Table], key: str, columns: object, used: dict[str, str]) -> list[str]:
    """The columns that an option lists. UserError unless all are there, once, and without another use."""
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
    tables: Sequence[Table], column: str, train: Ints, test: Ints
) -> tuple[list[str], tuple[NDArray[Any], NDArray[Any]], list[str]]:
    """(`column=category` for each category of the training rows, their columns for training and test rows, notes)."""
    values = [np.array(names_of(table, column), dtype=object) for table in tables]
    own_values, test_values = values[0][train], values[-1][test]
    names = sorted(set(own_values))
    if len(names) > MOST_CATEGORIES:
        most = f"at most {MOST_CATEGORIES}; is it an identifier?"
        raise UserError(f"{tables[0].name}: column {column!r} has {len(names)} categories; allowed: {most}")
    blocks = tuple((part[:, None] == np.array(names, dtype=object)).astype(bool) for part in (own_values, test_values))
    unseen = sorted(set(test_values) - set(names))
    lost = int((~blocks[1].any(1)).sum())
    said = [f"column {column!r}: {lost} test samples have categories that training lacks: {own.listed(unseen)}"]
    return [f"{column}={name}" for name in names], (blocks[0], blocks[1]), said if unseen else []
