"""Generated sentences: whose they are, that mood is in the words and differs by user, and that
nothing else moves."""

from __future__ import annotations

from pathlib import Path

import torch

from fedml_noniid.data.datasets import load

NOWHERE = Path("/nowhere")


def test_every_user_trains_and_tests_on_a_sixth() -> None:
    data = load("made_tweets", NOWHERE)
    assert data.train_owner is not None and data.test_owner is not None
    held = torch.cat([data.train_owner, data.test_owner]).bincount()
    assert len(held) == 40 and held.min() >= 12 and held.max() <= 36 and held.min() < held.max()
    assert torch.equal(data.test_owner.bincount(), held // 6)  # the sixth, the twelfth, ...
    assert data.train_owner.tolist() == sorted(data.train_owner.tolist())
    assert data.notes[0].startswith("generated sentences, not tweets: ")
