"""Statistics of measured numbers: medians, quartiles, ratios of neighbouring rounds."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile): the median, and the medians of the two halves."""
    ordered = sorted(values)
    half = -(-len(ordered) // 2)  # the middle one belongs to both
    return median(ordered[:half]), median(ordered), median(ordered[-half:])


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """The median of the ratios of neighbouring rounds. A slow machine slows both alike."""
    return median([value / divisor for value, divisor in zip(values, base, strict=True)])
