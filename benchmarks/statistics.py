"""What is made of measured numbers: medians, ratios within a repetition, a line's intercept."""

from __future__ import annotations

from collections.abc import Sequence


def median(values: Sequence[float]) -> float:
    """The middle one, or the mean of the two in the middle."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """The median of the ratios within each repetition: what slows a repetition down slows both."""
    return median([value / of for value, of in zip(values, base, strict=True)])


def outside(once: float, twice: float) -> float:
    """The share of a round that is not spent in the steps, from the seconds for E and for 2E epochs.

    t(E) = a + b E, so that a = 2 t(E) - t(2E). At least 0: noise can make it negative.
    """
    return max(0.0, (2 * once - twice) / once)
