"""Files of Sentiment140 as its authors write them, in small."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from fedml_noniid.data.readers.sent140 import FILE

Tweet = tuple[str, str, str]  # polarity, user, text


def rows(tweets: Sequence[Tweet]) -> bytes:
    text = io.StringIO()
    table = csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n")
    for number, (polarity, user, words) in enumerate(tweets):
        table.writerow([polarity, number, "Mon Apr 06 22:19:45 PDT 2009", "NO_QUERY", user, words])
    return text.getvalue().encode("latin-1")


def write(root: Path, tweets: Sequence[Tweet]) -> Path:
    path = root / "sent140" / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(rows(tweets))
    return root
