"""float32, in which training computes, and float64 for numbers that float32 can't tell apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LOST = 2**-20  # of a feature's deviation: float32 rounds centred numbers by 2**-24 of it
CHECKED = 2**18  # numbers that are compared
APART = 0.9  # of the different values; random numbers of float64 may agree in float32 too


def narrowed(x: NDArray[Any]) -> NDArray[Any]:
    """Samples [n, ...] as float32; float64 as it is if a feature would lose too much before it is
    centred."""
    with np.errstate(over="ignore"):  # becomes infinite, and is refused
        narrow = x.astype(np.float32, copy=False)
    if x.dtype != np.float64 or not np.isfinite(narrow).all():
        return narrow
    wide, rows = some(x), some(narrow)
    error = np.abs(wide - rows).max(0)
    lost = (error > LOST * wide.std(0)) & (wide.min(0) < wide.max(0))
    return x if (lost | merged(wide, rows)).any() else narrow


def some(x: NDArray[Any]) -> NDArray[Any]:
    """Some of the samples [n, ...], evenly spaced, of as many numbers as are compared."""
    return x[:: 1 + x.size // CHECKED]


def merged(x: NDArray[Any], narrow: NDArray[Any]) -> NDArray[np.bool_]:
    """The features of [n, ...] of which `narrow` has clearly fewer different values, [...]."""
    merges: NDArray[np.bool_] = different(narrow) < APART * different(x)
    return merges


def different(x: NDArray[Any]) -> NDArray[Any]:
    """How many different values each feature of [n, ...] has, [...]."""
    counts: NDArray[Any] = 1 + np.count_nonzero(np.diff(np.sort(x, axis=0), axis=0), axis=0)
    return counts
