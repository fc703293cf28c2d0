"""Label noise: kinds and rates by hand, what the draws depend on, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from fedml_noniid.data.label_noise import flipped

# Two clients of a training set with three classes. Position 4 is nobody's.
LABELS = np.array([0, 1, 2, 2, 0, 1])
CLIENTS = [np.array([0, 2, 5]), np.array([1, 3])]


def lists(found: list[np.ndarray]) -> list[list[int]]:
    return [own.tolist() for own in found]


def test_pairs_by_hand() -> None:
    """At rate 1 every label becomes the next, and the last class the first.

    The second client is clean.
    """
    assert lists(flipped("pair", np.array([1.0, 0.0]), LABELS, CLIENTS, 3, 0)) == [
        [1, 0, 2],
        [1, 2],
    ]


@pytest.mark.parametrize("kind", ["symmetric", "pair"])
def test_draws_depend_on_seed_client_and_position(kind: str) -> None:
    """A label is wrong or right in the same way at every higher rate, and whatever else the client
    holds."""
    clients, labels = [np.arange(0, 60, 2), np.arange(1, 60, 2)], np.arange(60) % 5
    few, many = (flipped(kind, np.full(2, rate), labels, clients, 5, 7) for rate in (0.2, 0.6))
    for positions, some, more in zip(clients, few, many, strict=True):
        wrong = some != labels[positions]
        assert np.array_equal(some[wrong], more[wrong]) and 0 < wrong.sum() < len(wrong)
    rest = flipped(kind, np.full(2, 0.6), labels, [clients[0][1:], clients[1]], 5, 7)
    assert np.array_equal(rest[0], many[0][1:])
    both = [np.arange(60), np.arange(60)]
    first, twin = flipped(kind, np.full(2, 0.5), labels, both, 5, 7)
    other, _ = flipped(kind, np.full(2, 0.5), labels, both, 5, 8)
    assert not np.array_equal(first, twin) and not np.array_equal(first, other)


@pytest.mark.parametrize("kind", ["symmetric", "pair"])
def test_the_transition_matrix(kind: str) -> None:
    """Co-teaching's matrices: 1 - rate on the diagonal, the rest on the next class, or equal shares
    on all others."""
    n, rate = 20_000, 0.4
    labels = np.arange(4 * n) % 4
    (found,) = flipped(kind, np.array([rate]), labels, [np.arange(4 * n)], 4, 7)
    for c in range(4):
        wanted = np.full(4, rate / 3 if kind == "symmetric" else 0.0)
        wanted[(c + 1) % 4] = rate / 3 if kind == "symmetric" else rate
        wanted[c] = 1 - rate
        shares = np.bincount(found[labels == c], minlength=4) / n
        assert (np.abs(shares - wanted) <= 4 * np.sqrt(wanted * (1 - wanted) / n)).all()
