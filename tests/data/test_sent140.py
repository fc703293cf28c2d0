"""Sentiment140: whose tweets, which split, which tokens; and what is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
        for _ in range(3 + (p == "4"))
    ]
    raw = sent140(write(tmp_path, tweets[::-1]), users=4, test_share=0.3)
    assert raw.train_owner is not None and raw.classes == ("negative", "positive")
    assert raw.train_x.dtype == torch.int32 and raw.train_y.dtype == raw.train_owner.dtype
    # 12 tweets say no, 16 yes; a third of each user's seven is held back, so yes leads or ties come
    # first as "no".
    assert {row[0] for row in tokens(raw, "train")} == {2, 3}
    for part in ("train", "test"):
        owner, label = getattr(raw, f"{part}_owner"), getattr(raw, f"{part}_y")
        assert [len(row) for row in tokens(raw, part)] == [k + 1 for k in owner.tolist()]
        pairs = {(row[0], y) for row, y in zip(tokens(raw, part), label.tolist(), strict=True)}
        assert len(pairs) == 2 and len({y for _, y in pairs}) == 2


counts = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=4), st.integers(1, 25), min_size=1, max_size=6
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40
)
@given(counts, st.sampled_from([1e-12, 0.1, 0.5, 0.9, 1 - 1e-12]))
def test_every_user_is_cut_by_itself(tmp_path: Path, counts: dict[str, int], share: float) -> None:
    """ceil(share n) tweets for the test, at least one but never all, each tweet on one side."""
    eligible = sorted(user for user, n in counts.items() if n >= 2)
    root = write(tmp_path, named(counts))
    if not eligible:
        with refuse("0 users have at least 2 tweets", "users=1"):
            sent140(root, users=1)
        return
    raw = sent140(root, users=len(eligible), test_share=share)
    assert raw.train_owner is not None and raw.test_owner is not None
    for number, user in enumerate(eligible):
        n = counts[user]
        held = min(max(1, math.ceil(round(share * n * 10) / 10)), n - 1)
        assert (raw.test_owner == number).sum() == held
        assert (raw.train_owner == number).sum() == n - held >= 1
    # Each tweet ends in a word of its own, which the vocabulary has if and only if the tweet
    # trains.
    assert sum(row[1] == UNKNOWN for row in tokens(raw, "train")) == 0
    assert all(row[1] == UNKNOWN for row in tokens(raw, "test"))
    assert len({row[1] for row in tokens(raw, "train")}) == len(raw.train_y)


def test_the_vocabulary_is_that_of_the_chosen_users(tmp_path: Path) -> None:
    """2 specials, and per chosen user its name and a word of each of its nine training tweets."""
    raw = sent140(write(tmp_path, named(dict.fromkeys("abcde", 10))), users=3)
    assert raw.embedding is not None and len(raw.embedding) == 2 + 3 * (1 + 9)
    small = sent140(tmp_path, users=3, vocabulary=4)
    assert small.embedding is not None and len(small.embedding) == 4
    assert max(map(max, tokens(small, "train"))) == 3


def test_random_users_are_the_same_in_any_order_of_the_file(tmp_path: Path) -> None:
    """Users' numbers of tweets tell them apart: the first or the most active would show."""
    tweets = named({user: 10 * (i + 1) for i, user in enumerate("abcdef")})
    first = sent140(write(tmp_path, tweets), users=3)
    # All tweets of a user in a row, users backwards: each user's own tweets keep their order.
    backwards = sorted(tweets, key=lambda tweet: tweet[1], reverse=True)
    moved = sent140(write(tmp_path, backwards), users=3)
    assert torch.equal(first.train_x, moved.train_x) and torch.equal(first.test_y, moved.test_y)
    assert first.train_owner is not None and first.test_owner is not None
    sizes = (first.train_owner.bincount() + first.test_owner.bincount()).tolist()
    assert sizes == sorted(sizes) and sizes not in ([10, 20, 30], [40, 50, 60])


def test_most_active_users_ties_alphabetically(tmp_path: Path) -> None:
    raw = sent140(
        write(tmp_path, named({"d": 3, "c": 5, "b": 5, "a": 2, "e": 9})),
        users=2,
        pick="most_active",
    )
    assert raw.train_owner is not None and raw.test_owner is not None
    assert (raw.train_owner.bincount() + raw.test_owner.bincount()).tolist() == [5, 9]
    assert "2 users, the most active of 5" in raw.notes


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


def test_the_notes_count(tmp_path: Path) -> None:
    """One user, ten tweets of three words; nine train, the word of the tenth is unknown: one of its
    three tokens."""
    raw = sent140(
        write(tmp_path, [("0", "a", f"the day w{i}") for i in range(10)]), users=1, length=3
    )
    assert "vocabulary of 13 entries, which 33.3 % of the test tokens are not in" in raw.notes
    assert "0 of 10 tweets cut to 3 tokens" in raw.notes
    assert any("glove.6B.300d.txt is not in" in note for note in raw.notes)
    assert "10 of 10 tweets cut to 2 tokens" in sent140(tmp_path, users=1, length=2).notes


def test_quotes_commas_line_breaks_latin_1_and_empty_tweets(tmp_path: Path) -> None:
    texts = ['say "hi", ok', "two\nlines", "caf\u00e9 \u00ff", "", ' "" ']
    raw = sent140(
        write(tmp_path, [("0", "a", t) for t in texts] * 2), users=1, test_share=0.001, length=6
    )
    seen = sorted(len(row) for row in tokens(raw, "train") + tokens(raw, "test"))
    assert seen == sorted([4, 2, 2, 1, 1] * 2)
    assert sum(row == [UNKNOWN] for row in tokens(raw, "train") + tokens(raw, "test")) >= 4


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
