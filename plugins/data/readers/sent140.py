"""Sentiment140: tweets by user, positive or negative, as CSV or as LEAF's JSON."""

from __future__ import annotations

import csv
import io
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
import torch

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.core.options import MOST, Count, Range
from fedml_noniid.plugins.data import text
from fedml_noniid.plugins.data.checks import refusal
from fedml_noniid.plugins.data.dataset import LEAK, Raw
from fedml_noniid.plugins.data.readers import leaf, user_data
from fedml_noniid.plugins.data.streams import stream
from fedml_noniid.plugins.data.types import Ints

PAGE = "http://help.sentiment140.com/for-students"
ARCHIVE, FILE = "trainingandtestdata.zip", "training.1600000.processed.noemoticon.csv"
COLUMNS = ("polarity", "id", "date", "query", "user", "text")
POLARITY = {"0": 0, "4": 1}
# in a sample of LEAF's: id, date, query, user, text, ... (its data/sent140/README.md)
LEAF_TEXT = 4


class _Tweets(NamedTuple):
    """Tweets of the chosen users, in the order of the users and then of the file."""

    owner: Ints  # [n]
    label: Ints  # [n]
    texts: list[str]

    def take(self, index: Ints) -> _Tweets:
        return _Tweets(self.owner[index], self.label[index], [self.texts[i] for i in index])


class _Parts(NamedTuple):
    train: _Tweets
    test: _Tweets
    read: _Tweets  # the vocabulary is made of these
    notes: list[str]


def sent140(
    root: Path,
    *,
    source: Literal["csv", "leaf"] = "csv",
    users: Count = 500,
    pick: Literal["random", "most_active"] = "random",
    min_samples: Annotated[int, Range(2, MOST)] = 2,
    split: Literal["per_user", "repo"] = "per_user",
    test_share: user_data.Share | None = None,
    vocabulary: text.Vocabulary = 3000,
    length: text.Length = 50,
) -> Raw:
    """Sentiment140 (Go, Bhayani, Huang 2009): tweets as tokens [n, length], negative or positive,
    with their users.

    `source` csv: <root>/sent140/training.1600000.processed.noemoticon.csv, or
    trainingandtestdata.zip there, of http://help.sentiment140.com/for-students. `source` leaf:
    <root>/sent140/train/*.json and test/*.json, which LEAF's data/sent140/preprocess.sh writes with
    `-t sample`: split already, and with the neutral tweets as negative.

    `users` users are picked among those with at least `min_samples` tweets: drawn at `random`
    (rFedAvg, section VI: "sample 500 users directly"), or the `most_active` (its repository), ties
    in alphabetical order. The paper states no minimum; LEAF's split drops users with a single
    tweet. Owners are numbered in the sorted order of the users' names. The draws do not depend on
    an experiment's seed.

    `split` per_user: of each user's n tweets, ceil(test_share n) are for the test, as LEAF cuts
    them, but at least one trains; `test_share` is 0.1. `split` repo is a leak: rFedAvg's repository
    tests on that share of the pooled tweets and trains its non-IID clients on all tweets. Only the
    vocabulary leaves the test tweets out.

    Tokens are torchtext's basic_english. The `vocabulary` holds the most frequent tokens of the
    training tweets, <pad> and <unk> included. Longer tweets are cut to `length` tokens, shorter
    tweets are padded at the end. The repository packs sequences and so neither cuts nor pads; model
    `lstm` stops before the padding, which is the same. Vectors are GloVe's if
    <root>/glove.6B.300d.txt exists (see `plugins.data.text.embedding`). Raises UserError for an
    option that isn't allowed, and for missing and damaged files.
    """
    folder = root / "sent140"
    if source == "leaf":
        for key, value, unset in (("split", split, "per_user"), ("test_share", test_share, None)):
            if value != unset:
                raise refusal(key, value, "none with source=leaf, whose files are split already")
        parts = _leaf(folder, users, pick, min_samples)
    else:
        share = 0.1 if test_share is None else test_share
        tweets, note = _csv(folder, users, pick, min_samples)
        parts = (_per_user if split == "per_user" else _as_the_repository)(tweets, share, note)
    return _raw(parts, root, vocabulary, length)


def _raw(parts: _Parts, root: Path, size: int, length: int) -> Raw:
    """Tokens, vocabulary and vectors."""
    train, test, read = parts.train, parts.test, parts.read
    found = text.read_texts(train.texts, test.texts, read.texts, root, size, length, "tweets")
    return Raw(
        found.train_x,
        torch.from_numpy(train.label),
        found.test_x,
        torch.from_numpy(test.label),
        ("negative", "positive"),
        train_owner=torch.from_numpy(train.owner),
        test_owner=torch.from_numpy(test.owner),
        embedding=found.vectors,
        notes=[*parts.notes, *found.notes],
    )


def _chosen(
    counts: Mapping[str, int], users: int, pick: str, least: int, where: Path
) -> tuple[dict[str, int], str]:
    """(the number of each chosen user by name, the report's note on the choice).

    UserError if there are too few.
    """
    eligible = sorted(name for name, n in counts.items() if n >= least)
    if len(eligible) < users:
        raise UserError(
            f"{where}: {len(eligible)} users have at least min_samples={least} tweets, too few "
            f"for users={users}; "
            "lower one of the two"
        )
    if pick == "random":
        drawn = stream(0, "sent140/users").choice(len(eligible), users, replace=False)
        names = [eligible[i] for i in drawn]
        how = f"drawn at random from the {len(eligible)} with at least {least} tweets"
    else:
        names = sorted(eligible, key=lambda name: (-counts[name], name))[:users]
        how = f"the most active of {len(counts)}"
    return {name: number for number, name in enumerate(sorted(names))}, f"{users} users, {how}"


def _csv(folder: Path, users: int, pick: str, least: int) -> tuple[_Tweets, str]:
    """(all tweets of the chosen users, the report's note on the choice)."""
    names: list[str] = []
    labels = bytearray()
    texts: list[str] = []
    with _opened(folder) as (where, lines):
        # The repository reads the file with pandas, which is as strict about quotes.
        rows = csv.reader(lines, strict=True)
        try:
            for row in rows:
                if len(row) != len(COLUMNS):
                    wanted = f"{len(COLUMNS)} ({', '.join(COLUMNS)})"
                    raise UserError(
                        f"{where}: line {rows.line_num} has {len(row)} columns; allowed: {wanted}"
                    )
                label = POLARITY.get(row[0])
                if label is None:
                    raise UserError(
                        f"{where}: line {rows.line_num} has polarity {row[0][:20]!r}; allowed: "
                        "0 (negative), "
                        "4 (positive); neutral tweets are in the test file only, which isn't used"
                    )
                names.append(row[4])
                labels.append(label)
                texts.append(row[5])
        except csv.Error as error:
            raise UserError(
                f"{where}: line {rows.line_num} is damaged or truncated ({error})"
            ) from None
    number, note = _chosen(Counter(names), users, pick, least, where)
    found = np.array([number.get(name, -1) for name in names], dtype=np.int64)
    order = np.argsort(found, kind="stable")
    order = order[np.searchsorted(found[order], 0) :]
    tweets = _Tweets(found, np.frombuffer(bytes(labels), dtype=np.uint8).astype(np.int64), texts)
    return tweets.take(order), note


@contextmanager
def _opened(folder: Path) -> Iterator[tuple[Path, Iterable[str]]]:
    """(the file, its lines): the CSV, or the archive that holds it.

    In Latin-1, every byte is a character.
    """
    file, archive = folder / FILE, folder / ARCHIVE
    if file.is_file():
        with file.open(encoding="latin-1", newline="") as lines:
            yield file, lines
    elif archive.is_file():
        try:
            with zipfile.ZipFile(archive) as members, members.open(FILE) as raw:
                yield archive, io.TextIOWrapper(raw, encoding="latin-1", newline="")
        except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
            raise UserError(
                f"{archive}: damaged, or without {FILE} ({' '.join(str(error).split())})"
            ) from None
    else:
        raise UserError(
            f"{file}: there is no such file; {PAGE} has {ARCHIVE}, put that or its {FILE} into "
            f"{folder}"
        )


def _per_user(tweets: _Tweets, share: float, note: str) -> _Parts:
    """Of each user's n tweets, ceil(share n) drawn at random are for the test; at least one, but
    never all."""
    sizes = np.bincount(tweets.owner)
    # Rounded: 0.1 * 70 is a bit more than 7.
    n_test = np.ceil(np.round(share * sizes, 9)).clip(1, sizes - 1).astype(np.int64)
    shuffled = np.lexsort((stream(0, "sent140/split").random(len(tweets.owner)), tweets.owner))
    place = np.arange(len(shuffled)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # within its user
    is_test = np.zeros(len(shuffled), dtype=bool)
    is_test[shuffled] = place < np.repeat(n_test, sizes)
    train = tweets.take(np.flatnonzero(~is_test))
    return _Parts(train, tweets.take(np.flatnonzero(is_test)), train, [note])


def _as_the_repository(tweets: _Tweets, share: float, note: str) -> _Parts:
    """All tweets train, and `share` of the pooled ones are the test."""
    n = len(tweets.owner)
    order = stream(0, "sent140/split").permutation(n)
    n_read = int(round((1 - share) * n, 9))
    read, test = (tweets.take(np.sort(part)) for part in (order[:n_read], order[n_read:]))
    if not 0 < n_read < n:
        raise refusal(
            "test_share", share, f"a share that leaves some of the {n} tweets on both sides"
        )
    leak = (
        f"all {len(test.owner)} test tweets are training tweets as well (split: repo, as in "
        "rFedAvg's repository)"
    )
    return _Parts(tweets, test, read, [LEAK + leak, note])


def _leaf(folder: Path, users: int, pick: str, least: int) -> _Parts:
    """LEAF's own split."""
    train, test = (
        {user.name: user for user in leaf.users(part)} for part in leaf.part_folders(folder)
    )
    counts = {
        name: len(user.y) + len(test[name].y if name in test else ())
        for name, user in train.items()
    }
    number, note = _chosen(counts, users, pick, least, folder / "train")
    mine, tested = _users_tweets(train, number), _users_tweets(test, number)
    if not tested.texts:
        raise UserError(
            f"{folder / 'test'}: has no tweet of the {users} chosen users; preprocess.sh needs "
            "-t sample"
        )
    return _Parts(mine, tested, mine, [f"{note} (LEAF's files)"])


def _users_tweets(found: Mapping[str, leaf.User], number: Mapping[str, int]) -> _Tweets:
    owner, label, texts = [], [], []
    for name in number:
        if name not in found:
            continue
        user = found[name]
        for i, (x, y) in enumerate(zip(user.x, user.y, strict=True)):
            if not (isinstance(x, list) and len(x) > LEAF_TEXT and isinstance(x[LEAF_TEXT], str)):
                raise UserError(f"{user.where}: x[{i}] is not [id, date, query, user, text]")
            if type(y) is not int or y not in (0, 1):
                raise UserError(
                    f"{user.where}: y[{i}] is {y!r}; allowed: 0 (negative), 1 (positive)"
                )
            owner.append(number[name])
            label.append(y)
            texts.append(x[LEAF_TEXT])
    return _Tweets(np.array(owner, dtype=np.int64), np.array(label, dtype=np.int64), texts)
