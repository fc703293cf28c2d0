"""A user's own texts: a column of text with a label, from CSV, parquet or memory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedml_noniid.plugins.data.checks import whole_number
from fedml_noniid.plugins.data.dataset import Raw
from fedml_noniid.plugins.data.readers import user_data
from fedml_noniid.plugins.data.readers.frames import (
    Table,
    check_columns,
    from_files,
    in_memory,
    names_of,
    parted,
)
from fedml_noniid.plugins.data.text import SPECIALS, read_texts

if TYPE_CHECKING:  # see frames.py
    import pandas as pd

VOCABULARY, LENGTH = 3000, 50  # rFedAvg's, see readers/sent140.py


def text(
    root: Path,
    *,
    file: str,
    text: str,
    label: str,
    test_file: str | None = None,
    test_share: float | None = None,
    owner: str | None = None,
    vocabulary: int = VOCABULARY,
    length: int = LENGTH,
) -> Raw:
    """<root>/<file>: a table as of data set `table`, with a column `text` of which x is made:
    tokens [n, length] int32.

    `label`, `owner`, `test_file` and `test_share` are those of `table`. Tokens are torchtext's
    basic_english. The `vocabulary` holds the most frequent tokens of the training texts, <pad> and
    <unk> included. Longer texts are cut to `length` tokens, shorter texts are padded at the end.
    Vectors are GloVe's if <root>/glove.6B.300d.txt exists, otherwise they are drawn (see
    `plugins.data.text.embedding`); a note says which. Raises UserError for missing and damaged
    files, and for columns and values that don't fit.
    """
    return _raw(
        from_files(root, file, test_file), root, text, label, owner, test_share, vocabulary, length
    )


def of_texts(
    frame: pd.DataFrame,
    test: pd.DataFrame | None = None,
    *,
    text: str,
    label: str,
    owner: str | None = None,
    test_share: float | None = None,
    vocabulary: int = VOCABULARY,
    length: int = LENGTH,
    vectors: Path = Path("."),
) -> Raw:
    """As data set `text`, of tables in memory.

    `vectors`: the folder where GloVe's file may lie. UserError as there.
    """
    return _raw(in_memory(frame, test), vectors, text, label, owner, test_share, vocabulary, length)


def _raw(
    tables: list[Table],
    root: Path,
    column: str,
    label: str,
    owner: str | None,
    test_share: object,
    size: int,
    length: int,
) -> Raw:
    whole_number("vocabulary", size, len(SPECIALS) + 1)
    whole_number("length", length, 1, 1000)
    check_columns(tables, text=column, label=label, owner=owner)
    texts = [np.array(names_of(table, column), dtype=object) for table in tables]
    rows = parted(tables, label, owner, test_share)
    train, test = texts[0][rows.train].tolist(), texts[-1][rows.test].tolist()
    read = read_texts(train, test, train, root, size, length, "texts")
    notes = [*rows.notes, *read.notes, *user_data.repeated(read.train_x, read.test_x)]
    return Raw(
        read.train_x,
        rows.train_y,
        read.test_x,
        rows.test_y,
        rows.classes,
        train_owner=rows.train_owner,
        test_owner=rows.test_owner,
        embedding=read.vectors,
        notes=notes,
    )
