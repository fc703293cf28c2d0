"""CCN's figures: pictures say what the numbers say, worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from research.targets import Built
from tests.research import by_hand
from tests.research.by_hand import is_picture, paper, rows, run


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    """Of a paper."""
    paper(tmp_path)


def cosines(*rounds: list[float]) -> dict[str, torch.Tensor]:
    values = torch.tensor(rounds)
    weights = torch.tensor([0.25, 0.25, 0.5]).double().expand(len(rounds), 3).contiguous()
    return {"round/similarity_to_global": values, "ccn/weights": weights}


def similarity(root: Path) -> Built:
    return by_hand.built(
        root,
        "similarity",
        {"study": "one", "scenario": "near", "original": "a", "normalised": "b", "apart": 3},
    )


def test_similarity(tmp_path: Path) -> None:
    """Client 3: 0.5, 0.7 (mean 0.6) becomes 0.7, 0.9 (0.8) on seed 0, and 0.6 becomes 0.7 on seed
    1: +0.2 and +0.1.

    Mean +0.15, deviation 0.1 / sqrt(2) = 0.07071. The others: 0.9 becomes 0.8 on both, a difference
    without a spread. Seed 2 has no partner.
    """
    assert similarity(tmp_path).missing == ("original", "normalised")
    for recipe, seed, first, second in (
        ("a", 0, [0.9, 0.9, 0.5], [0.9, 0.9, 0.7]),
        ("b", 0, [0.8, 0.8, 0.7], [0.7, 0.9, 0.9]),
        ("a", 1, [0.9, 0.9, 0.6], [0.9, 0.9, 0.6]),
        ("b", 1, [0.8, 0.8, 0.6], [0.8, 0.8, 0.8]),
        ("b", 2, [0.1, 0.1, 0.1], [0.1, 0.1, 0.1]),
    ):
        run(tmp_path, "near", recipe, seed, [0.1, 0.2], recorded=cosines(first, second))
    built = similarity(tmp_path)
    assert is_picture(built) and built.missing == ()
    for sentence, words in zip(
        built.sentences,
        (
            "Client 3: over all rounds the cosine with the global model is 0.6000 with FedAvg and "
            "0.7500 normalised: +0.15000, 95 % interval -0.48531 to +0.78531 over 2 seeds: ",
            "The other clients: over all rounds the cosine with the global model is 0.9000 with "
            "FedAvg and 0.8000 normalised: -0.10000",
            "The normalisation gives client 3 a weight of 0.500 on average, where an equal weight "
            "is 0.333; client 3 has most",
        ),
        strict=True,
    ):
        assert sentence.startswith(words)
    line = [float(value) for value in rows(built)[5].values()]  # seed 0, round 2, client 3
    assert line == pytest.approx([0, 2, 3, 0.7, 0.9, 0.5]) and len(rows(built)) == 2 * 2 * 3


CONVERGENCE = {
    "scale": 100,
    "panels": [
        {"title": "Left", "study": "one", "scenario": "near"},
        {"title": "Right", "study": "one", "scenario": "far"},
    ],
    "lines": {"A": "a", "A, normalised": "b", "C": "c", "C, normalised": "d"},
    "dashed": {"A": "A, normalised", "C": "C, normalised"},
}


def test_convergence(tmp_path: Path) -> None:
    """Eight rounds, so a quarter is two.

    A gains 4, 2, then 0, and at last -1, -3 points; C gains 1 in every round.

    First quarter: A (4 + 2) / 2 = 3, C 1, mean 2. Last: A (-1 - 3) / 2 = -2, C 1, mean -0.5. Above:
    2 + 8 of 16. Seeds without a partner do not count.
    """
    gains = [0.04, 0.02, 0, 0, 0, 0, -0.01, -0.03]
    for recipe, seed, curve in (
        ("a", 0, [0.5] * 8),
        ("b", 0, [0.5 + gain for gain in gains]),
        ("b", 1, [0.99] * 8),
        ("c", 0, [0.5] * 8),
        ("c", 1, [0.1] * 8),
        ("d", 0, [0.51] * 8),
    ):
        run(tmp_path, "near", recipe, seed, curve)
    built = by_hand.built(tmp_path, "convergence", CONVERGENCE)
    assert is_picture(built)
    assert built.sentences == (
        "Left: the normalised line is above the original in 10 of 16 rounds of 2 schemes; on "
        "average by +2.00 points in the first quarter of the rounds and by -0.50 in the last; "
        "after the last round it is ahead for C.",
    )
    assert built.missing == ("Right, A", "Right, A, normalised", "Right, C", "Right, C, normalised")
