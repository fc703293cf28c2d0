"""Label noise: kinds and rates by hand, what the draws depend on, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.label_noise import flipped, rates

# Two clients of a training set with three classes. Position 4 is nobody's.
LABELS = np.array([0, 1, 2, 2, 0, 1])
CLIENTS = [np.array([0, 2, 5]), np.array([1, 3])]


def lists(found: list[np.ndarray]) -> list[list[int]]:
    return [own.tolist() for own in found]


@pytest.mark.parametrize(
    ("form", "n", "wanted"),
    [
        ("equal", 3, [0.5] * 3),
        ("level", 3, [0, 0.25, 0.5]),
        ("level", 2, [0, 0.5]),
        ("level", 1, [0.5]),
        ("equal", 1, [0.5]),
    ],
)
def test_rates_by_hand(form: str, n: int, wanted: list[float]) -> None:
    assert rates(form, 0.5, n).tolist() == wanted


def test_pairs_by_hand() -> None:
    """At rate 1 every label becomes the next, and the last class the first.

    The second client is clean.
    """
    assert lists(flipped("pair", np.array([1.0, 0.0]), LABELS, CLIENTS, 3, 0)) == [
        [1, 0, 2],
        [1, 2],
    ]


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


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from(("symmetric", "pair")),
    st.integers(2, 5),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(0, 2**63 - 1),
    st.integers(2, 60),
)
def test_draws_depend_on_seed_client_and_position(
    kind: str, n_classes: int, one: float, other: float, seed: int, n: int
) -> None:
    """A label is wrong or right in the same way at every higher rate, and whatever else the client
    holds."""
    low, high = sorted((one, other))
    labels = np.arange(n) % n_classes
    clients = [np.arange(0, n, 2), np.arange(1, n, 2)]
    few, many = (
        flipped(kind, np.full(2, rate), labels, clients, n_classes, seed) for rate in (low, high)
    )
    for positions, some, more in zip(clients, few, many, strict=True):
        assert ((more >= 0) & (more < n_classes)).all()
        wrong = some != labels[positions]
        assert np.array_equal(some[wrong], more[wrong])
    half = flipped(kind, np.full(2, high), labels, [clients[0][1:], clients[1]], n_classes, seed)
    assert np.array_equal(half[0], many[0][1:])
    same, zeros = [np.arange(99), np.arange(99)], np.zeros(99, np.int64)
    first, twin = flipped("symmetric", np.full(2, 0.5), zeros, same, 10, seed)
    other, _ = flipped("symmetric", np.full(2, 0.5), zeros, same, 10, seed ^ 1)
    assert not np.array_equal(first, twin) and not np.array_equal(first, other)


def test_data_with_a_single_class_are_refused() -> None:
    with pytest.raises(UserError, match="label_noise = 'pair' is refused; allowed: data with at"):
        flipped("pair", np.ones(2), LABELS, CLIENTS, 1, 0)
