"""Sentiment140's two formats: whose tweets, which split, which tokens; and what is refused."""

from __future__ import annotations

import itertools
import math
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedml_noniid.plugins.data.dataset import Dataset, Raw
from fedml_noniid.plugins.data.datasets import load
from fedml_noniid.plugins.data.readers.sent140 import ARCHIVE, FILE, sent140
from fedml_noniid.plugins.data.text import PAD, UNKNOWN
from tests.data.reading import refuse
from tests.data.tweets import Tweet, both, leaf, rows, user_data, write


def named(counts: Mapping[str, int]) -> list[Tweet]:
    """So many tweets of each user, one of each in turn; a tweet says whose it is, and is the only
    one like it."""
    turns = [(user, i) for i in range(max(counts.values())) for user in counts if i < counts[user]]
    return [("04"[len(user + str(i)) % 2], user, f"{user} {user}x{i}") for user, i in turns]


def tokens(raw: Raw, part: str) -> list[list[int]]:
    """Each sample's tokens without its padding."""
    return [[token for token in row if token != PAD] for row in getattr(raw, f"{part}_x").tolist()]


def test_three_users_by_hand(tmp_path: Path) -> None:
    """The third user comes first in the file and last in the order; one test tweet each."""
    tweets = [
        ("4", "zoe", "good good"),
        ("0", "ann", "bad"),
        ("4", "mia", "good day"),
        ("0", "zoe", "bad good"),
        ("4", "ann", "good"),
        ("0", "mia", "bad day"),
    ]
    raw = sent140(write(tmp_path, tweets), users=3, test_share=0.5, length=3)
    assert raw.classes == ("negative", "positive")
    assert raw.train_owner is not None and raw.test_owner is not None and raw.embedding is not None
    assert raw.train_owner.tolist() == raw.test_owner.tolist() == [0, 1, 2]
    assert (raw.train_x.shape, raw.test_x.shape, raw.train_x.dtype) == ((3, 3), (3, 3), torch.int32)
    assert raw.train_y.dtype == raw.train_owner.dtype == torch.int64
    # "good" is positive and "bad" negative wherever a tweet is a single word; zoe's and mia's
    # differ in the first one.
    found = sorted(raw.train_y.tolist() + raw.test_y.tolist())
    assert found == [0, 0, 0, 1, 1, 1]
    for owner in range(3):
        assert raw.train_y[owner] + raw.test_y[owner] == 1, "each has one of each label"
    assert raw.embedding.shape[0] == 2 + len(
        {token for row in tokens(raw, "train") for token in row} - {UNKNOWN}
    )


def test_labels_and_tokens_stay_with_their_tweet(tmp_path: Path) -> None:
    """A negative tweet says "no", a positive one "yes", as often as its user's number plus one."""
    tweets = [
        (p, f"u{k}", " ".join([word] * (k + 1)))
        for k in range(4)
        for p, word in (("0", "no"), ("4", "yes"))
        for _ in range(3 + (p == "4"))
    ]
    raw = sent140(write(tmp_path, tweets[::-1]), users=4, test_share=0.3)
    # 12 tweets say no, 16 yes; a third of each user's seven is held back, so yes leads or ties come
    # first as "no".
    words = {row[0] for row in tokens(raw, "train")}
    assert words == {2, 3}
    for part in ("train", "test"):
        owner, label = getattr(raw, f"{part}_owner"), getattr(raw, f"{part}_y")
        lengths = [len(row) for row in tokens(raw, part)]
        assert lengths == [k + 1 for k in owner.tolist()]
        pairs = {(row[0], y) for row, y in zip(tokens(raw, part), label.tolist(), strict=True)}
        assert len(pairs) == 2 and len({y for _, y in pairs}) == 2


counts = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=4), st.integers(1, 25), min_size=1, max_size=6
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40
)
@given(counts, st.sampled_from([0.1, 0.2, 0.5, 0.9]))
def test_every_user_is_cut_by_itself(tmp_path: Path, counts: dict[str, int], share: float) -> None:
    """ceil(share n) tweets for the test but never all, each tweet on one side."""
    eligible = sorted(user for user, n in counts.items() if n >= 2)
    tweets = named(counts)
    root = write(tmp_path, tweets)
    if not eligible:
        with refuse("0 users have at least min_samples=2", "users=1"):
            sent140(root, users=1)
        return
    raw = sent140(root, users=len(eligible), test_share=share)
    assert raw.train_owner is not None and raw.test_owner is not None
    for number, user in enumerate(eligible):
        n = counts[user]
        held = min(math.ceil(round(share * n * 10) / 10), n - 1)
        assert (raw.test_owner == number).sum() == held
        assert (raw.train_owner == number).sum() == n - held >= 1
    # Each tweet ends in a word of its own, which the vocabulary has if and only if the tweet
    # trains.
    assert sum(row[1] == UNKNOWN for row in tokens(raw, "train")) == 0
    assert all(row[1] == UNKNOWN for row in tokens(raw, "test"))
    assert len({row[1] for row in tokens(raw, "train")}) == len(raw.train_y)


@pytest.mark.parametrize("share", [1e-12, 1 - 1e-12])
def test_both_sides_have_a_tweet_of_every_user(tmp_path: Path, share: float) -> None:
    raw = sent140(write(tmp_path, named({"a": 2, "b": 7})), users=2, test_share=share)
    assert raw.train_owner is not None and raw.test_owner is not None
    few, many = (
        (raw.test_owner, raw.train_owner) if share < 0.5 else (raw.train_owner, raw.test_owner)
    )
    assert few.bincount().tolist() == [1, 1] and many.bincount().tolist() == [1, 6]


def test_the_vocabulary_is_that_of_the_chosen_users(tmp_path: Path) -> None:
    """2 specials, and per chosen user its name and a word of each of its nine training tweets."""
    raw = sent140(write(tmp_path, named(dict.fromkeys("abcde", 10))), users=3)
    assert raw.embedding is not None and len(raw.embedding) == 2 + 3 * (1 + 9)
    small = sent140(tmp_path, users=3, vocabulary=4)
    assert small.embedding is not None and len(small.embedding) == 4
    assert max(map(max, tokens(small, "train"))) == 3


def test_random_users_are_the_same_in_any_order_of_the_file(tmp_path: Path) -> None:
    counts = {f"user{i:02}": 4 for i in range(30)}
    tweets = named(counts)
    first = sent140(write(tmp_path, tweets), users=5)
    again = sent140(write(tmp_path, tweets), users=5)
    # All tweets of a user in a row, users backwards: each user's own tweets keep their order.
    moved = sent140(
        write(tmp_path, sorted(tweets, key=lambda tweet: tweet[1], reverse=True)), users=5
    )
    for other in (again, moved):
        assert torch.equal(first.train_x, other.train_x) and torch.equal(first.test_y, other.test_y)


def test_random_users_are_a_matter_of_chance(tmp_path: Path) -> None:
    """Three of six whose numbers of tweets tell them apart: were they the first or the most active,
    it would show."""
    counts = {user: 10 * (i + 1) for i, user in enumerate("abcdef")}
    raw = sent140(write(tmp_path, named(counts)), users=3)
    assert raw.train_owner is not None and raw.test_owner is not None
    sizes = (raw.train_owner.bincount() + raw.test_owner.bincount()).tolist()
    assert len(set(sizes)) == 3 and set(sizes) <= set(counts.values()) and sizes == sorted(sizes)
    assert sizes not in ([10, 20, 30], [40, 50, 60])


def test_most_active_users_ties_alphabetically(tmp_path: Path) -> None:
    raw = sent140(
        write(tmp_path, named({"d": 3, "c": 5, "b": 5, "a": 2, "e": 9})),
        users=2,
        pick="most_active",
    )
    assert raw.train_owner is not None and raw.test_owner is not None
    sizes = (raw.train_owner.bincount() + raw.test_owner.bincount()).tolist()
    assert sizes == [5, 9]
    assert "2 users, the most active of 5" in raw.notes
    # b, not c: whose two words are in the vocabulary.
    tweets = [(p, u, "a b" if u == "b" else "x") for p, u, _ in named({"c": 5, "b": 5})]
    other = sent140(write(tmp_path, tweets), users=1, pick="most_active")
    assert other.embedding is not None and len(other.embedding) == 4


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
    assert "all 3 test tweets" in Dataset.of("sent140", raw).leak
    sound = sent140(tmp_path, users=2)
    assert (
        not any("LEAK" in note for note in sound.notes) and Dataset.of("sent140", sound).leak == ""
    )


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


def test_the_archive_is_read_as_it_is(tmp_path: Path) -> None:
    tweets = named({"a": 5, "b": 7})
    plain = sent140(write(tmp_path / "plain", tweets), users=2)
    archive = tmp_path / "zipped" / "sent140" / ARCHIVE
    archive.parent.mkdir(parents=True)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as members:
        members.writestr("testdata.manual.2009.06.14.csv", b"")
        members.writestr(FILE, rows(tweets))
    zipped = sent140(tmp_path / "zipped", users=2)
    assert torch.equal(plain.train_x, zipped.train_x) and torch.equal(plain.test_y, zipped.test_y)
    content = bytearray(archive.read_bytes())
    content[200] ^= 255
    archive.write_bytes(content)
    with refuse(archive, "damaged"):
        sent140(tmp_path / "zipped", users=2)
    archive.write_bytes(content[:100])
    with refuse(archive, "damaged"):
        sent140(tmp_path / "zipped", users=2)
    with zipfile.ZipFile(archive, "w") as members:
        members.writestr("other.csv", b"")
    with refuse(archive, "without", FILE):
        sent140(tmp_path / "zipped", users=2)


def test_without_files_the_page_the_archive_and_the_folder_are_named(tmp_path: Path) -> None:
    with refuse(tmp_path / "sent140" / FILE, "http://help.sentiment140.com/for-students", ARCHIVE):
        load("sent140", tmp_path)


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
        (LINE, "0 users have at least min_samples=2 tweets, too few for users=1"),
        ("", "0 users have at least min_samples=2 tweets"),
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
        ({"users": 3}, "2 users have at least min_samples=2 tweets, too few for users=3"),
        ({"users": 2, "min_samples": 6}, "1 users have at least min_samples=6"),
        ({"users": 2, "split": "repo", "test_share": 0.99}, "test_share = 0.99 is refused"),
        ({"users": 2, "split": "repo", "test_share": 1e-12}, "test_share = 1e-12 is refused"),
        ({"users": 2, "size": [2, 2]}, "size = [2, 2] is refused"),
    ],
)
def test_options_are_checked(tmp_path: Path, options: dict[str, object], message: str) -> None:
    write(tmp_path, named({"a": 5, "b": 6}))
    with refuse(message):
        load("sent140", tmp_path, **options)


def test_a_saved_data_set_is_the_same(tmp_path: Path) -> None:
    data = load("sent140", write(tmp_path, named({"a": 5, "b": 6})), users=2, length=4)
    data.save(tmp_path / "x.safetensors")
    again = Dataset.read(tmp_path / "x.safetensors")
    assert again.checksum == data.checksum and again.notes == data.notes
    assert again.embedding is not None and data.embedding is not None
    assert torch.equal(again.embedding, data.embedding)
    assert torch.equal(again.normalised("train"), data.train_x.float())


# LEAF


TRAIN = [("4", "zoe", "good day"), ("0", "ann", "bad"), ("0", "ann", "sad"), ("4", "mia", "fine")]
TEST = [("0", "zoe", "bad day"), ("4", "ann", "good")]


def test_leafs_own_split_by_hand(tmp_path: Path) -> None:
    """Without mia, who has one tweet.

    Words by frequency in training, then alphabet: bad, day, good, sad from 2 on.
    """
    raw = sent140(both(tmp_path, TRAIN, TEST), source="leaf", users=2, length=2)
    assert raw.train_owner is not None and raw.test_owner is not None
    assert raw.train_owner.tolist() == [0, 0, 1] and raw.test_owner.tolist() == [0, 1]
    assert raw.train_x.tolist() == [[2, 0], [5, 0], [4, 3]]
    assert raw.test_x.tolist() == [[4, 0], [2, 3]]
    assert raw.train_y.tolist() == [0, 0, 1] and raw.test_y.tolist() == [1, 0]
    assert "2 users, drawn at random from the 2 with at least 2 tweets (LEAF's files)" in raw.notes


def test_leafs_users_may_lie_in_several_files(tmp_path: Path) -> None:
    whole = sent140(both(tmp_path / "one", TRAIN, TEST), source="leaf", users=2)
    both(tmp_path / "two", TRAIN[1:], TEST)
    leaf(tmp_path / "two" / "sent140" / "train" / "zzz.json", TRAIN[:1])
    assert torch.equal(sent140(tmp_path / "two", source="leaf", users=2).train_x, whole.train_x)


def test_the_two_formats_of_the_same_tweets_agree(tmp_path: Path) -> None:
    """Of all ways to hold one tweet of each user back, LEAF's files give the CSV's tensors for
    exactly one."""
    tweets = [
        ("04"[i % 2], user, " ".join([user] * (i + 1))) for i in range(5) for user in "ba"[i == 4 :]
    ]
    raw = sent140(write(tmp_path, tweets), users=2, length=9)
    mine, theirs = ([tweet for tweet in tweets if tweet[1] == user] for user in "ab")
    same, tensors = (
        0,
        ("train_x", "train_y", "test_x", "test_y", "train_owner", "test_owner", "embedding"),
    )
    for held in itertools.product(mine, theirs):
        both(tmp_path, [tweet for tweet in tweets if tweet not in held], held)
        found = sent140(tmp_path, source="leaf", users=2, length=9)
        same += all(torch.equal(getattr(raw, name), getattr(found, name)) for name in tensors)
    assert same == 1


@pytest.mark.parametrize(
    ("sample", "label", "message"),
    [
        (["1", "d", "q"], 1, "user 'zoe': x[0] is not [id, date, query, user, text]"),
        (["1", "d", "q", "z", 3], 1, "user 'zoe': x[0] is not [id, date, query, user, text]"),
        (
            ["1", "d", "q", "z", "a"],
            2,
            "user 'zoe': y[0] is 2; allowed: 0 (negative), 1 (positive)",
        ),
        (
            ["1", "d", "q", "z", "a"],
            "1",
            "user 'zoe': y[0] is '1'; allowed: 0 (negative), 1 (positive)",
        ),
    ],
)
def test_no_tweet_of_leafs_is_refused(
    tmp_path: Path, sample: list[object], label: object, message: str
) -> None:
    both(tmp_path, TRAIN, TEST)
    data = user_data(TRAIN) | {"zoe": {"x": [sample], "y": [label]}}
    path = leaf(tmp_path / "sent140" / "train" / "all_data_train_9.json", TRAIN, user_data=data)
    with refuse(path, message):
        sent140(tmp_path, source="leaf", users=2)


def test_leaf_files_that_are_missing_or_of_other_users(tmp_path: Path) -> None:
    with refuse(tmp_path / "sent140" / "train", "holds no *.json", "preprocess.sh"):
        sent140(tmp_path, source="leaf")
    both(tmp_path, TRAIN, TEST)
    leaf(tmp_path / "sent140" / "test" / "all_data_test_9.json", [("0", "bob", "other users")])
    with refuse(tmp_path / "sent140" / "test", "no tweet of the 1 chosen users", "-t sample"):
        sent140(tmp_path, source="leaf", users=1)


def test_leafs_split_is_not_split_again(tmp_path: Path) -> None:
    both(tmp_path, TRAIN, TEST)
    for options, message in (
        ({"split": "repo"}, "split = 'repo' is refused"),
        ({"test_share": 0.1}, "test_share = 0.1 is refused"),
    ):
        with refuse(message, "source=leaf"):
            load("sent140", tmp_path, source="leaf", users=2, **options)
    with refuse("2 users have at least min_samples=2 tweets, too few for users=3"):
        sent140(tmp_path, source="leaf", users=3)
