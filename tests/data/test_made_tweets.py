"""Generated sentences: whose they are, that mood is in the words and differs by user, and that
nothing else moves."""

from __future__ import annotations

from pathlib import Path

import torch

from fedml_noniid.data.datasets import load
from fedml_noniid.data.readers.made_tweets import made_tweets

NOWHERE = Path("/nowhere")


def test_every_user_trains_and_tests_on_a_sixth() -> None:
    data = load("made_tweets", NOWHERE)
    assert data.train_owner is not None and data.test_owner is not None
    held = torch.cat([data.train_owner, data.test_owner]).bincount()
    assert len(held) == 40 and held.min() >= 12 and held.max() <= 36 and held.min() < held.max()
    assert torch.equal(data.test_owner.bincount(), held // 6)  # the sixth, the twelfth, ...
    assert data.train_owner.tolist() == sorted(data.train_owner.tolist())
    assert data.notes[0].startswith("generated sentences, not tweets: ")


def test_the_same_sentences_every_time_and_more_users_are_added_behind() -> None:
    few, many = made_tweets(NOWHERE, users=5), made_tweets(NOWHERE, users=9)
    again = made_tweets(NOWHERE, users=5)
    for name in ("train_x", "train_y", "test_x", "test_y"):
        assert torch.equal(getattr(few, name), getattr(again, name))
    assert torch.equal(few.train_y, many.train_y[: len(few.train_y)])
