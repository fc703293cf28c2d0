"""A user's own texts: a column of text with a label, from CSV, parquet or memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedml_noniid.core.options import check_options
from fedml_noniid.data.checks import known
from fedml_noniid.data.dataset import Raw
from fedml_noniid.data.readers import user_data
from fedml_noniid.data.readers.frames import (
    complete,
    rows_of,
    table_of,
    texts_of,
    used_columns,
    without_owners,
)
from fedml_noniid.data.readers.table_files import (
    Dialect,
    Encoding,
    Separator,
    reading_notes,
    tables_of,
)
from fedml_noniid.data.text import Length, Vocabulary, encode, read_texts, tokenise

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
    test_share: user_data.Share | None = None,
    owner: str | None = None,
    vocabulary: Vocabulary = VOCABULARY,
    length: Length = LENGTH,
    separator: Separator | None = None,
    encoding: Encoding | None = None,
    sheet: str | None = None,
) -> Raw:
    """<root>/<file>: a table as of data set `table`, with a column `text` of which x is made:
    tokens [n, length] int32.

    `label`, `owner`, `test_file`, `test_share`, `separator`, `encoding` and `sheet` are those of
    `table`. Tokens are torchtext's
    basic_english. The `vocabulary` holds the most frequent tokens of the training texts, <pad> and
    <unk> included. Longer texts are cut to `length` tokens, shorter texts are padded at the end.
    Vectors are GloVe's if <root>/glove.6B.300d.txt exists, otherwise they are drawn (see
    `data.text.embedding`); a note says which. Raises UserError for missing and damaged
    files, and for columns and values that don't fit.
    """
    options = locals()
    return replace(_made(options, ()), without=partial(_made, options))


def _made(options: Mapping[str, Any], unseen: Sequence[str]) -> Raw:
    """The data set of a table with the options of `text`, without the owners `unseen`."""
    text, label, owner, length = (options[key] for key in ("text", "label", "owner", "length"))
    dialect = Dialect(options["separator"], None, options["encoding"], options["sheet"])
    tables = tables_of(options["root"], options["file"], options["test_file"], dialect)
    used = used_columns(tables, text=text, label=label, owner=owner)
    tables, apart = without_owners(tables, owner, unseen) if unseen else (tables, None)
    cells = {
        column: [complete(table, column, texts_of(table, column)) for table in tables]
        for column in used
    }
    rows = rows_of([table.name for table in tables], used, cells, options["test_share"])
    parts = (cells[text][0], rows.train), (cells[text][-1], rows.test)
    train, test = ([part.texts[i] for i in part.number[some]] for part, some in parts)
    train_x, test_x, vectors, notes, entries = read_texts(
        train, test, train, options["root"], options["vocabulary"], length, "texts"
    )
    raw = rows.raw([train_x, test_x], 255, reading_notes(tables), notes, vectors)
    raw = replace(raw, encode=partial(_encoded, text, entries, length))
    if apart is None:
        return raw
    x = _encoded(text, entries, length, apart.frame)
    assert x is not None, "a frame is encoded"
    labels, owners = (complete(apart, name, texts_of(apart, name)) for name in (label, owner))
    return user_data.with_unseen(raw, x, labels, owners, unseen)


def _encoded(column: str, entries: Sequence[str], length: int, x: object) -> Tensor | None:
    """The tokens [n, length] of a list of new texts, or of the column of new rows.

    None for other things. UserError for rows without the column or without a text.
    """
    import pandas as pd

    if isinstance(x, list | tuple) and all(isinstance(item, str) for item in x):
        x = pd.DataFrame({column: list(x)})
    if not isinstance(x, pd.DataFrame):
        return None
    table = table_of("x", x)
    known("x: column", column, table.frame.columns)
    texts, number = complete(table, column, texts_of(table, column))
    return encode([tokenise(texts[i]) for i in number], entries, length)


def of_texts(
    frame: pd.DataFrame,
    test: pd.DataFrame | None = None,
    vectors: Path = Path(),
    **options: Any,
) -> Raw:
    """As data set `text` with its options, of tables in memory.

    `vectors`: the folder where GloVe's file may lie. UserError as there, and for wrong options.
    """
    check_options(text, {"file": "", **options})
    sources: Any = {"file": frame, "test_file": test}
    return text(vectors, **sources, **options)
