"""Sentiment140: whose tweets, which split, which tokens; and what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from fedml_noniid.data.dataset import Dataset, Raw
from fedml_noniid.data.datasets import load
from fedml_noniid.data.readers.sent140 import FILE, sent140
from fedml_noniid.data.text import PAD, UNKNOWN
from tests.data.reading import refuse
from tests.data.tweets import Tweet, write


def named(counts: Mapping[str, int]) -> list[Tweet]:
    """So many tweets of each user, one of each in turn; a tweet says whose it is, and is the only
    one like it."""
    turns = [(user, i) for i in range(max(counts.values())) for user in counts if i < counts[user]]
    return [("04"[len(user + str(i)) % 2], user, f"{user} {user}x{i}") for user, i in turns]


def tokens(raw: Raw, part: str) -> list[list[int]]:
    """Each sample's tokens without its padding."""
    return [[token for token in row if token != PAD] for row in getattr(raw, f"{part}_x").tolist()]


def test_labels_and_tokens_stay_with_their_tweet(tmp_path: Path) -> None:
    """A negative tweet says "no", a positive one "yes", as often as its user's number plus one."""
    tweets = [
        (p, f"u{k}", " ".join([word] * (k + 1)))
        for k in range(4)
        for p, word in (("0", "no"), ("4", "yes"))
        for _ in range(3 + k * (p == "4"))
    ]
    raw = sent140(write(tmp_path, tweets[::-1]), users=4, test_share=0.3)
    assert raw.train_owner is not None and raw.classes == ("negative", "positive")
    assert raw.train_x.dtype == torch.int32 and raw.train_y.dtype == raw.train_owner.dtype
    assert {row[0] for row in tokens(raw, "train")} == {2, 3}
    for part in ("train", "test"):
        owner, label = getattr(raw, f"{part}_owner"), getattr(raw, f"{part}_y")
        assert [len(row) for row in tokens(raw, part)] == [k + 1 for k in owner.tolist()]
        pairs = {(row[0], y) for row, y in zip(tokens(raw, part), label.tolist(), strict=True)}
        assert len(pairs) == 2 and len({y for _, y in pairs}) == 2


def test_the_repositorys_split_leaks_and_says_so(tmp_path: Path) -> None:
    """30 tweets: all train, 3 of them are the test; the vocabulary is that of the other 27."""
    raw = sent140(write(tmp_path, named({"a": 10, "b": 20})), users=2, split="repo")
    assert (len(raw.train_y), len(raw.test_y)) == (30, 3)
    assert raw.train_owner is not None and raw.train_owner.tolist() == [0] * 10 + [1] * 20
    assert raw.embedding is not None and len(raw.embedding) == 2 + 2 + 27
    assert sum(row[1] == UNKNOWN for row in tokens(raw, "train")) == 3
    assert all(row[1] == UNKNOWN for row in tokens(raw, "test"))
    (leak,) = [note for note in raw.notes if note.startswith("LEAK: ")]
    assert "all 3 test tweets are training tweets" in leak
    assert "all 3 test tweets" in Dataset.from_raw("sent140", raw).leak
    assert Dataset.from_raw("sent140", sent140(tmp_path, users=2)).leak == ""


@pytest.mark.parametrize("share", [1e-12, 0.1, 0.5, 1 - 1e-12])
def test_every_user_is_cut_by_itself(tmp_path: Path, share: float) -> None:
    """ceil(share n) tweets for the test, at least one but never all, each tweet on one side."""
    counts = {"a": 1, "b": 2, "c": 10, "d": 25}
    raw = sent140(write(tmp_path, named(counts)), users=3, test_share=share)
    assert raw.train_owner is not None and raw.test_owner is not None
    held = [min(max(1, math.ceil(share * n)), n - 1) for n in (2, 10, 25)]
    assert raw.test_owner.bincount().tolist() == held
    assert raw.train_owner.bincount().tolist() == [2 - held[0], 10 - held[1], 25 - held[2]]
    # Each tweet ends in a word of its own, which the vocabulary has only if the tweet trains.
    assert not any(row[1] == UNKNOWN for row in tokens(raw, "train"))
    assert all(row[1] == UNKNOWN for row in tokens(raw, "test"))
    assert len({row[1] for row in tokens(raw, "train")}) == len(raw.train_y)


def test_users_are_picked_and_texts_are_read_as_they_are(tmp_path: Path) -> None:
    """The same users in any order of the file; ties of the most active in alphabetical order."""
    tweets = named({"d": 3, "c": 5, "b": 5, "a": 2, "e": 9})
    backwards = sorted(tweets, key=lambda tweet: tweet[1], reverse=True)
    first, moved = (sent140(write(tmp_path, some), users=2) for some in (tweets, backwards))
    assert torch.equal(first.train_x, moved.train_x) and torch.equal(first.test_y, moved.test_y)
    raw = sent140(tmp_path, users=2, pick="most_active", vocabulary=4)
    assert raw.train_owner is not None and raw.test_owner is not None
    assert (raw.train_owner.bincount() + raw.test_owner.bincount()).tolist() == [5, 9]
    assert "2 users, the most active of 5" in raw.notes and max(map(max, tokens(raw, "train"))) == 3
    texts = ['say "hi", ok', "two\nlines", "caf\u00e9 \u00ff", "", ' "" ']
    root = write(tmp_path, [("0", "a", text) for text in texts] * 2)
    raw = sent140(root, users=1, test_share=0.001, length=6)
    rows = tokens(raw, "train") + tokens(raw, "test")
    assert sorted(map(len, rows)) == sorted([4, 2, 2, 1, 1] * 2)
    assert sum(row == [UNKNOWN] for row in rows) >= 4


LINE = '"0","1","d","q","ann","good"\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            LINE + '"0","1","d","q","ann"\n',
            "line 2 has 5 columns; allowed: 6 (polarity, id, date, query, user, text)",
        ),
        (LINE + '"0","1","d","q","ann","a","b"\n', "line 2 has 7 columns"),
        (LINE + "\n", "line 2 has 0 columns"),
        (
            LINE + LINE + '"0","1","d","q","ann","go',
            "line 3 is damaged or truncated (unexpected end of data)",
        ),
        (LINE + '"0","1","d","q","ann","a" b"\n', "line 2 is damaged or truncated"),
        (
            LINE + '"2","1","d","q","ann","a"\n',
            "line 2 has polarity '2'; allowed: 0 (negative), 4 (positive)",
        ),
        (LINE + LINE + '"x","1","d","q","ann","a"\n', "line 3 has polarity 'x'"),
        ('"target","ids","date","flag","user","text"\n' + LINE, "line 1 has polarity 'target'"),
        (LINE, "0 users have at least 2 tweets, too few for users=1"),
        ("", "0 users have at least 2 tweets"),
        (LINE + '"0","1","d","q","ann","' + "a" * 140_000, "line 2 is damaged or truncated"),
    ],
)
def test_a_damaged_csv_is_one_line_that_names_the_line(
    tmp_path: Path, content: str, message: str
) -> None:
    write(tmp_path, [])
    path = tmp_path / "sent140" / FILE
    path.write_text(content, encoding="latin-1")
    with refuse(path, message):
        sent140(tmp_path, users=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"users": 3}, "2 users have at least 2 tweets, too few for users=3"),
        ({"users": 2, "split": "repo", "test_share": 0.99}, "test_share = 0.99 is refused"),
        ({"users": 2, "split": "repo", "test_share": 1e-12}, "test_share = 1e-12 is refused"),
        ({"users": 2, "size": [2, 2]}, "size = [2, 2] is refused"),
    ],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, object], message: str) -> None:
    write(tmp_path, named({"a": 5, "b": 6}))
    with refuse(message):
        load("sent140", tmp_path, **options)
