"""Writes numbers over seeds, and what their differences show, for the tables' sentences.

A difference is decided by the paired t test of pipelines/reporting/comparison.py: its 95 % interval
leaves out 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from fedml_noniid.pipelines.reporting.comparison import LEVEL, holm, interval, p_value
from fedml_noniid.pipelines.reporting.summary import Spread


def plus_minus(value: Spread | None, decimals: int = 2, sign: str = "", unit: str = "") -> str:
    """`98.02 ± 0.03`. One seed has no deviation. A missing value is `-`."""
    if value is None:
        return "-"
    return f"{value.mean:{sign}.{decimals}f}{unit}" + (
        "" if value.std is None else f" ± {value.std:.{decimals}f}"
    )


def against(name: str, other: str, difference: Spread, decimals: int = 2, unit: str = "") -> str:
    """Compares one method with another by their differences on the same seeds.

    `unit`: of the numbers, as ` points`.
    """
    ends = interval(difference)
    if ends is None or ends[0] == ends[1]:
        return f"{name} less {other} is {evidence(difference, decimals, unit)}"
    low, high = ends
    over = f"95 % interval over {difference.n} seeds"
    if low <= 0 <= high:
        both = f"{low:+.{decimals}f} to {high:+.{decimals}f}{unit}"
        return f"{name} is not told apart from {other} ({both}, {over})"
    near, far = sorted((abs(low), abs(high)))
    side = "above" if low > 0 else "below"
    return f"{name} is {side} {other} by {near:.{decimals}f} to {far:.{decimals}f}{unit} ({over})"


def evidence(difference: Spread, decimals: int = 2, unit: str = "") -> str:
    """A mean difference with its 95 % interval: `+2.00, 95 % interval -1.00 to +5.00 over 3 seeds:
    undecided`."""
    mean, ends = f"{difference.mean:+z.{decimals}f}{unit}", interval(difference)
    if ends is None:
        return f"{mean} on one seed: no evidence either way"
    low, high = ends
    if low == high:
        return f"{mean} on each of {difference.n} seeds"
    undecided = ": undecided" if low <= 0 <= high else ""
    return (
        f"{mean}, 95 % interval {low:+.{decimals}f} to {high:+.{decimals}f} over "
        f"{difference.n} seeds{undecided}"
    )


def confirmed(differences: Sequence[Spread]) -> tuple[int, int]:
    """How many differences are above 0 and below 0 by the paired t test, after Holm's adjustment
    for all of them."""
    adjusted = holm([p_value(difference) for difference in differences])
    means = [one.mean for one, p in zip(differences, adjusted, strict=True) if p < LEVEL]
    return sum(mean > 0 for mean in means), sum(mean < 0 for mean in means)
