"""Whole numbers from exact shares."""

from __future__ import annotations

import numpy as np

from fedml_noniid.data.types import Floats, Ints


def rounded(exact: Floats, total: int) -> Ints:
    """Whole numbers that add up to `total`: rounded down, then one more for the largest remainders.

    [N] -> [N]
    """
    whole = np.floor(exact).astype(np.int64)
    whole[np.argsort(whole - exact, kind="stable")[: total - whole.sum()]] += 1
    return np.asarray(whole)
