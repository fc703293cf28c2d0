"""Skew measures: by hand on a few numbers, and on data whose skew is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedml_noniid as nd
from fedml_noniid.data.feature_skew import clarity, shift, spread
from fedml_noniid.data.statistics import hellinger, summary


def column(*values: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array(values, float).reshape(-1, 1)


def test_hellinger_distance_by_hand() -> None:
    """Against (1/2, 1/2), one class alone has sqrt(1 - sqrt(1/2)); equal classes have 0."""
    assert hellinger(np.array([[4, 0], [0, 4]])) == pytest.approx([np.sqrt(1 - np.sqrt(0.5))] * 2)
    assert hellinger(np.array([[3, 3], [1, 1]])) == pytest.approx([0, 0], abs=1e-7)
    assert summary(np.array([[4, 0], [0, 4]]))["label_hellinger_mean"] == pytest.approx(
        np.sqrt(1 - np.sqrt(0.5))
    )


def test_shift_by_hand() -> None:
    """Means 1 and 5 around 3: SSB = 2 * 2 * 4 = 16.

    SSW = 2 + 2 with 2 degrees of freedom: (16 - 1 * 2) / 20.
    """
    assert shift(column(0, 2, 4, 6), np.zeros(4, int), np.array([0, 0, 1, 1])) == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("values", "labels", "clients"),
    [
        ((0, 2, 40, 42), (0, 0, 1, 1), (0, 0, 1, 1)),  # clients differ by class only
        ((0, 2, 0, 2), (0, 0, 0, 0), (0, 0, 1, 1)),  # less apart than chance: -2 / 4 before the cut
        ((1, 5, 9), (0, 0, 0), (0, 1, 2)),  # one sample each: nothing to compare with
        ((3, 3), (0, 0), (0, 1)),
    ],
)
def test_no_shift(
    values: tuple[float, ...], labels: tuple[int, ...], clients: tuple[int, ...]
) -> None:
    assert shift(column(*values), np.array(labels), np.array(clients)) == 0


def test_spread_by_hand() -> None:
    """Squares 2 and 18 with 1 degree each, together 20 / 2: r = sqrt(0.2), sqrt(1.8), which deviate
    by sqrt(0.2)."""
    x, labels, clients = column(-1, 1, -3, 3), np.zeros(4, int), np.array([0, 0, 1, 1])
    assert spread(x, labels, clients) == pytest.approx(np.sqrt(0.2))
    # A class that scatters more is no spread, if a client has only that class.
    assert spread(x, np.array([0, 0, 1, 1]), clients) == 0
    assert spread(column(1, 2), np.array([0, 0]), np.array([0, 1])) == 0


def test_clarity_by_hand() -> None:
    """With the second label wrong the means are 0 and 20 / 3: the sample at 1 is nearer to 0."""
    x = column(0, 1, 9, 10)
    assert clarity(x, np.array([0, 0, 1, 1])) == 1
    assert clarity(x, np.array([0, 1, 1, 1])) == 0.75


@pytest.fixture(scope="module")
def plain() -> dict[str, float]:
    return dict(nd.partition(nd.load("digits"), "iid", clients=10).statistics)


@pytest.mark.parametrize(
    ("skew", "moved", "by", "kept"),
    [
        (
            {"rotation": {"degrees": [0, 90]}},
            "feature_shift",
            0.2,
            ("feature_spread", "label_hellinger_mean"),
        ),
        (
            {"noise": {"sigma": 0.5}},
            "feature_spread",
            0.2,
            ("feature_shift", "label_hellinger_mean"),
        ),
        (
            {"label_noise": {"rate": 0.3}},
            "class_clarity",
            -0.2,
            ("feature_shift", "label_hellinger_mean"),
        ),
        (
            {"partition": "shards_equal"},
            "label_hellinger_mean",
            0.5,
            ("feature_shift", "feature_spread"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_skew_moves_its_own_measure(
    plain: dict[str, float], skew: dict[str, Any], moved: str, by: float, kept: tuple[str, ...]
) -> None:
    found = nd.partition(
        nd.load("digits"), **({"partition": "iid", "clients": 10} | skew)
    ).statistics
    assert (found[moved] - plain[moved]) / by > 1
    assert all(abs(found[name] - plain[name]) < 0.05 for name in kept)
    assert found["classes"] == 10
