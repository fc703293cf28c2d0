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
    Dialect,
    check_columns,
    complete,
    rows_of,
    table_of,
    texts_of,
    used_columns,
)
from fedml_noniid.data.readers.table_files import (
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
    column, label, owner, length = (options[key] for key in ("text", "label", "owner", "length"))
    dialect = Dialect(options["separator"], None, options["encoding"], options["sheet"])
    tables = tables_of(options["root"], options["file"], options["test_file"], dialect)
    names = [table.name for table in tables]
    used = used_columns(tables[0], text=column, label=label, owner=owner)
    check_columns(tables, [*used])
    cells = {
        name: [complete(table, name, texts_of(table, name)) for table in tables] for name in used
    }
    apart: dict[str, Any] = {}
    if unseen:
        apart, cells = user_data.apart(cells, owner, unseen, names)
    rows = rows_of(names, used, cells, options["test_share"])
    train, test = cells[column][0][rows.train].tolist(), cells[column][-1][rows.test].tolist()
    train_x, test_x, vectors, notes, entries = read_texts(
        train, test, train, options["root"], options["vocabulary"], length, "texts"
    )
    raw = rows.raw([train_x, test_x], 255, reading_notes(tables), notes, vectors)
    raw = replace(raw, encode=partial(_encoded, column, entries, length))
    if not unseen:
        return raw
    x = encode([tokenise(text) for text in apart[column]], entries, length)
    return user_data.with_unseen(raw, x, apart[label], apart[owner], unseen)


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
    texts = complete(table, column, texts_of(table, column))
    return encode([tokenise(text) for text in texts], entries, length)


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
