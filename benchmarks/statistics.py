"""What is made of measured numbers: medians, and ratios within a repetition."""

from __future__ import annotations

from collections.abc import Sequence


def median(values: Sequence[float]) -> float:
    """The middle one, or the mean of the two in the middle."""
    ordered = sorted(values)
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and the medians of what lies below and above it."""
    ordered = sorted(values)
    half = -(-len(ordered) // 2)  # the middle one belongs to both
    return median(ordered[:half]), median(ordered), median(ordered[-half:])


def ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """The median of the ratios of neighbours: what slows one of them down slows both."""
    return median([value / of for value, of in zip(values, base, strict=True)])
