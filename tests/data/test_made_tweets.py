"""Generated sentences: whose they are, that mood is in the words and differs by user, and that
nothing else moves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedml_noniid.plugins.data.dataset import Dataset
from fedml_noniid.plugins.data.datasets import load
from fedml_noniid.plugins.data.readers.made_tweets import made_tweets
from fedml_noniid.plugins.data.text import PAD, UNKNOWN
from tests.data.reading import refuse

NOWHERE = Path("/nowhere")


def parts() -> tuple[Dataset, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(data, x, y, owner), training samples before those of the test."""
    data = load("made_tweets", NOWHERE)
    assert data.train_owner is not None and data.test_owner is not None
    x, y = torch.cat([data.train_x, data.test_x]), torch.cat([data.train_y, data.test_y])
    return data, x, y, torch.cat([data.train_owner, data.test_owner])


def test_every_user_trains_and_tests_on_a_sixth() -> None:
    data, _, _, owner = parts()
    assert data.train_owner is not None and data.test_owner is not None
    held, tested = owner.bincount(), data.test_owner.bincount()
    assert len(held) == 40 and held.min() >= 12 and held.max() <= 36 and held.min() < held.max()
    assert torch.equal(tested, held // 6)  # the sixth, the twelfth, ...
    assert data.train_owner.tolist() == sorted(data.train_owner.tolist())


def test_the_data_say_that_they_are_no_tweets() -> None:
    data, _, y, _ = parts()
    assert data.notes == (f"generated sentences, not tweets: {len(y)} of 40 made-up users",)
    assert data.leak == "" and data.classes == ("sad", "glad")


def test_tokens_are_words_of_the_vocabulary_padded_behind() -> None:
    data, x, _, _ = parts()
    assert data.embedding is not None
    assert x.dtype == torch.int32 and x.max() < len(data.embedding)
    filled = x != PAD
    assert (filled.sum(1) >= 4).all()  # subject, verb, mood, ending
    assert torch.equal(filled.sum(1), filled.int().cumprod(1).sum(1))  # no word behind padding
    assert not (data.train_x == UNKNOWN).any()  # the vocabulary is theirs
    often = data.train_x.flatten().bincount()[UNKNOWN + 1 :]
    assert torch.equal(
        often, often.sort(descending=True).values
    )  # and by how often they have a word
    assert data.embedding.shape[1] == 16 and data.embedding.dtype == torch.float32
    assert (data.embedding[PAD] == 0).all() and (data.embedding[1:].norm(dim=1) > 0).all()


def test_words_tell_the_mood_better_than_chance_and_not_for_certain() -> None:
    """Counting glad and sad training sentences per word classifies the test: naive Bayes in
    float64."""
    data, _, y, _ = parts()
    assert data.embedding is not None
    counts = np.ones((2, len(data.embedding)))
    for row, label in zip(data.train_x.numpy(), data.train_y.numpy(), strict=True):
        np.add.at(counts[label], row[row != PAD], 1)
    score = np.log(counts / counts.sum(1, keepdims=True))
    said = (score[1] - score[0])[data.test_x.numpy()] * (data.test_x.numpy() != PAD)
    accuracy = ((said.sum(1) > 0) == data.test_y.numpy()).mean()
    assert 0.8 < accuracy < 0.995
    assert 0.35 < y.double().mean() < 0.65


def test_users_differ_in_mood_and_subject() -> None:
    """The shares of glad sentences spread far more than users with one mood in common would make
    them."""
    _, x, y, owner = parts()
    shares = [y[owner == user].double().mean().item() for user in range(40)]
    by_chance = (0.25 / owner.bincount().double().mean()).sqrt().item()
    assert np.std(shares) > 1.5 * by_chance
    first = [x[owner == user][:, :2].tolist() for user in range(40)]
    favourite = [max(map(one.count, one)) / len(one) for one in first]
    assert np.mean(favourite) > 0.3  # of eight subjects


def test_the_same_sentences_every_time_and_more_users_are_added_behind() -> None:
    few, many = made_tweets(NOWHERE, users=5), made_tweets(NOWHERE, users=9)
    again = made_tweets(NOWHERE, users=5)
    for name in ("train_x", "train_y", "test_x", "test_y"):
        assert torch.equal(getattr(few, name), getattr(again, name))
    assert torch.equal(few.train_y, many.train_y[: len(few.train_y)])


@pytest.mark.parametrize("size", [[2, 2]])
def test_sentences_are_no_images(size: list[int]) -> None:
    with refuse("size = [2, 2] is refused"):
        load("made_tweets", NOWHERE, size=size)
