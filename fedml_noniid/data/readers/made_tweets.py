"""Made-up sentences by user, glad or sad: text without a download, to try the same steps as for
Sentiment140."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from fedml_noniid.core.options import Range
from fedml_noniid.data import text
from fedml_noniid.data.dataset import Raw
from fedml_noniid.data.streams import stream
from fedml_noniid.data.types import Floats

SUBJECTS = (
    "the train",
    "my exam",
    "this song",
    "our match",
    "the rain",
    "my phone",
    "that film",
    "lunch",
)
VERBS = ("was", "felt", "looked", "turned out")
MOODS = (
    ("awful", "sad", "broken", "boring", "late"),
    ("great", "lovely", "funny", "sunny", "brilliant"),
)
ENDINGS = (("...", "oh no", "not again"), ("!", "so happy", "yes"))
CLEAR = 0.9  # how often a word is of its sentence's mood
LEAST, MOST = 12, 36  # sentences of a user
LENGTH, WIDTH = 10, 16  # tokens of a sentence, numbers of a word's vector


def made_tweets(root: Path, *, users: Annotated[int, Range(1, 10_000)] = 40) -> Raw:
    """Sentences made by rule, not tweets: tokens [n, 10] with vectors of 16, glad (1) or sad (0),
    with their users.

    A sentence is "<subject> <verb> <mood word> <ending>". Each of the `users` has a share of glad
    sentences, between 0.1 and 0.9, and mostly the same few subjects. So labels, words and amounts
    differ from user to user. Word and ending each have the sentence's mood nine times in ten. Of a
    user's 12 to 36 sentences, every sixth is for the test. `root` isn't used; the draws do not
    depend on an experiment's seed. Raises UserError for a number of users that isn't allowed.
    """
    sentences = [_sentences(user) for user in range(users)]
    owner = np.repeat(np.arange(users), [len(tweets) for tweets in sentences])
    is_test = np.concatenate([np.arange(len(tweets)) % 6 == 5 for tweets in sentences])
    tokens = [text.tokenise(sentence) for tweets in sentences for sentence, _ in tweets]
    label = np.array([mood for tweets in sentences for _, mood in tweets])
    train, test = np.flatnonzero(~is_test), np.flatnonzero(is_test)
    vocabulary = text.vocabulary((tokens[i] for i in train), 1000)  # which is more than there are
    x = text.encode(tokens, vocabulary, LENGTH)
    vectors = stream(0, "made tweets/vectors").standard_normal((len(vocabulary), WIDTH))
    vectors[text.PAD] = 0
    y, whose = torch.from_numpy(label), torch.from_numpy(owner)
    return Raw(
        x[train],
        y[train],
        x[test],
        y[test],
        ("sad", "glad"),
        train_owner=whose[train],
        test_owner=whose[test],
        embedding=torch.from_numpy(vectors.astype(np.float32)),
        notes=[f"generated sentences, not tweets: {len(label)} of {users} made-up users"],
    )


def _sentences(user: int) -> list[tuple[str, int]]:
    """(sentence, mood) of one user."""
    rng = stream(0, "made tweets/sentences", user)
    glad = rng.uniform(0.1, 0.9)
    favour: Floats = rng.dirichlet(np.full(len(SUBJECTS), 0.3))
    sentences = []
    for _ in range(rng.integers(LEAST, MOST + 1)):
        mood = int(rng.random() < glad)
        word, ending = (mood if rng.random() < CLEAR else 1 - mood for _ in range(2))
        parts = (
            SUBJECTS[rng.choice(len(SUBJECTS), p=favour)],
            *map(rng.choice, (VERBS, MOODS[word], ENDINGS[ending])),
        )
        sentences.append((" ".join(map(str, parts)), mood))
    return sentences
