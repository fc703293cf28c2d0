"""Files of Sentiment140 as its authors and as LEAF write them, in small."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedml_noniid.plugins.data.readers.sent140 import FILE

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


def user_data(tweets: Sequence[Tweet]) -> dict[str, Any]:
    """As data/sent140/preprocess/data_to_json.py: [id, date, query, user, text, which file] and 1
    for "4"."""
    found: dict[str, Any] = {}
    for number, (polarity, user, text) in enumerate(tweets):
        held = found.setdefault(user, {"x": [], "y": []})
        held["x"].append([str(number), "date", "NO_QUERY", user, text, "training"])
        held["y"].append(int(polarity == "4"))
    return found


def leaf(path: Path, tweets: Sequence[Tweet], **changes: object) -> Path:
    data = user_data(tweets)
    content = {
        "users": list(data),
        "num_samples": [len(held["y"]) for held in data.values()],
        "user_data": data,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content | changes))
    return path


def both(root: Path, train: Sequence[Tweet], test: Sequence[Tweet]) -> Path:
    leaf(root / "sent140" / "train" / "all_data_train_9.json", train)
    leaf(root / "sent140" / "test" / "all_data_test_9.json", test)
    return root
