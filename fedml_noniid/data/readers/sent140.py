"""Sentiment140: tweets by user, positive or negative, as CSV."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import Count
from fedml_noniid.data import text
from fedml_noniid.data.checks import refusal
from fedml_noniid.data.dataset import LEAK, Raw
from fedml_noniid.data.readers import user_data
from fedml_noniid.data.streams import stream
from fedml_noniid.data.types import Ints

PAGE = "http://help.sentiment140.com/for-students"
ARCHIVE, FILE = "trainingandtestdata.zip", "training.1600000.processed.noemoticon.csv"
COLUMNS = ("polarity", "id", "date", "query", "user", "text")
POLARITY = {"0": 0, "4": 1}


class _Tweets(NamedTuple):
    """Tweets of the chosen users, in the order of the users and then of the file."""

    owner: Ints  # [n]
    label: Ints  # [n]
    texts: NDArray[np.object_]  # [n]


def sent140(
    root: Path,
    *,
    users: Count = 500,
    pick: Literal["random", "most_active"] = "random",
    split: Literal["per_user", "repo"] = "per_user",
    test_share: user_data.Share = 0.1,
    vocabulary: text.Vocabulary = 3000,
    length: text.Length = 50,
) -> Raw:
    """Sentiment140 (Go, Bhayani, Huang 2009): tweets as tokens [n, length], negative or positive,
    with their users.

    <root>/sent140 holds training.1600000.processed.noemoticon.csv, unpacked from
    trainingandtestdata.zip of http://help.sentiment140.com/for-students.

    `users` users are picked among those with two tweets or more: drawn at `random` (rFedAvg,
    section VI: "sample 500 users directly"), or the `most_active` (its repository), ties in
    alphabetical order. The paper states no minimum; LEAF's split of these tweets drops users with a
    single tweet, too. Owners are numbered in the sorted order of the users' names. The draws do
    not depend on an experiment's seed.

    `split` per_user: of each user's n tweets, ceil(test_share n) are for the test, as LEAF cuts
    them, but at least one trains. `split` repo is a leak: rFedAvg's repository tests on that share
    of the pooled tweets and trains its non-IID clients on all tweets. Only the vocabulary leaves
    the test tweets out.

    Tokens are torchtext's basic_english. The `vocabulary` holds the most frequent tokens of the
    training tweets, <pad> and <unk> included. Longer tweets are cut to `length` tokens, shorter
    tweets are padded at the end. The repository packs sequences and so neither cuts nor pads; model
    `lstm` stops before the padding, which is the same. Vectors are GloVe's if
    <root>/glove.6B.300d.txt exists (see `data.text.embedding`). Raises UserError for an
    option that isn't allowed, and for missing and damaged files.
    """
    tweets, notes = _read(root / "sent140", users, pick)
    if split == "per_user":
        train, test = _per_user(tweets.owner, test_share)
        source = train
    else:
        source, test = _pooled(len(tweets.texts), test_share)
        train = np.arange(len(tweets.texts))
        leak = f"all {len(test)} test tweets are training tweets as well"
        notes.insert(0, f"{LEAK}{leak} (split: repo, as in rFedAvg's repository)")
    first, second, third = (tweets.texts[rows].tolist() for rows in (train, test, source))
    train_x, test_x, vectors, more, _ = text.read_texts(
        first, second, third, root, vocabulary, length, "tweets"
    )
    label, owner = torch.from_numpy(tweets.label), torch.from_numpy(tweets.owner)
    return Raw(
        train_x,
        label[train],
        test_x,
        label[test],
        ("negative", "positive"),
        train_owner=owner[train],
        test_owner=owner[test],
        embedding=vectors,
        notes=[*notes, *more],
    )


def _chosen(
    counts: Mapping[str, int], users: int, pick: str, file: Path
) -> tuple[dict[str, int], str]:
    """(the number of each chosen user by name, the report's note on the choice).

    UserError if there are too few.
    """
    eligible = sorted(name for name, n in counts.items() if n >= 2)
    if len(eligible) < users:
        raise UserError(
            f"{file}: {len(eligible)} users have at least 2 tweets, too few for users={users}"
        )
    if pick == "random":
        drawn = stream(0, "sent140/users").choice(len(eligible), users, replace=False)
        names = [eligible[i] for i in drawn]
        how = f"drawn at random from the {len(eligible)} with at least 2 tweets"
    else:
        names = sorted(eligible, key=lambda name: (-counts[name], name))[:users]
        how = f"the most active of {len(counts)}"
    return {name: number for number, name in enumerate(sorted(names))}, f"{users} users, {how}"


def _read(folder: Path, users: int, pick: str) -> tuple[_Tweets, list[str]]:
    """(all tweets of the chosen users, the report's note on the choice)."""
    file = folder / FILE
    if not file.is_file():
        raise UserError(
            f"{file}: there is no such file; unpack it from {ARCHIVE} ({PAGE} has it) into {folder}"
        )
    names: list[str] = []
    labels: list[int] = []
    texts: list[str] = []
    # In Latin-1, every byte is a character.
    with file.open(encoding="latin-1", newline="") as lines:
        # The repository reads the file with pandas, which is as strict about quotes.
        rows = csv.reader(lines, strict=True)
        try:
            for row in rows:
                source = f"{file}: line {rows.line_num}"
                if len(row) != len(COLUMNS):
                    wanted = f"{len(COLUMNS)} ({', '.join(COLUMNS)})"
                    raise UserError(f"{source} has {len(row)} columns; allowed: {wanted}")
                if row[0] not in POLARITY:
                    raise UserError(
                        f"{source} has polarity {row[0][:20]!r}; allowed: 0 (negative), 4 "
                        "(positive); neutral tweets are in the test file only, which isn't used"
                    )
                names.append(row[4])
                labels.append(POLARITY[row[0]])
                texts.append(row[5])
        except csv.Error as error:
            raise UserError(
                f"{file}: line {rows.line_num} is damaged or truncated ({error})"
            ) from None
    number, note = _chosen(Counter(names), users, pick, file)
    owner = np.array([number.get(name, -1) for name in names], dtype=np.int64)
    order = np.argsort(owner, kind="stable")
    order = order[np.searchsorted(owner[order], 0) :]
    label = np.array(labels, dtype=np.int64)
    return _Tweets(owner[order], label[order], np.array(texts, dtype=object)[order]), [note]


def _per_user(owner: Ints, share: float) -> tuple[Ints, Ints]:
    """(training tweets, test tweets): of each user's n, ceil(share n) drawn at random are for the
    test; at least one, but never all."""
    sizes = np.bincount(owner)
    # Rounded: 0.1 * 70 is a bit more than 7.
    n_test = np.ceil(np.round(share * sizes, 9)).clip(1, sizes - 1).astype(np.int64)
    shuffled = np.lexsort((stream(0, "sent140/split").random(len(owner)), owner))
    rank = np.arange(len(shuffled)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # within its user
    is_test = np.zeros(len(shuffled), dtype=bool)
    is_test[shuffled] = rank < np.repeat(n_test, sizes)
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)


def _pooled(n: int, share: float) -> tuple[Ints, Ints]:
    """(the others, test tweets): `share` of all n tweets is for the test."""
    order = stream(0, "sent140/split").permutation(n)
    n_others = int(round((1 - share) * n, 9))
    if not 0 < n_others < n:
        raise refusal(
            "test_share", share, f"a share that leaves some of the {n} tweets on both sides"
        )
    return np.sort(order[:n_others]), np.sort(order[n_others:])
