"""Shared parts of the targets' sentences: numbers with their spread, and whether a difference exceeds it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fedml_noniid.pipelines.reporting.summary import Spread

Name = TypeVar("Name", str, float)


def plus_minus(value: Spread | None, decimals: int = 2, sign: str = "", unit: str = "") -> str:
    """`98.02 ± 0.03`. One seed has no spread. A missing value is `-`."""
    if value is None:
        return "-"
    return f"{value.mean:{sign}.{decimals}f}{unit}" + ("" if value.std is None else f" ± {value.std:.{decimals}f}")


def against(name: str, other: str, difference: Spread, decimals: int = 2, unit: str = "") -> str:
    """Compares one method with another. The difference counts if it exceeds its own `std`."""
    high = "above" if difference.mean > 0 else "below"
    how = f"{abs(difference.mean):.{decimals}f}{unit} {high}" if difference.mean else "as good as"
    return f"{name} is {how} {other}, {beyond(difference, decimals)}"


def beyond(difference: Spread, decimals: int = 2) -> str:
    """Whether a difference exceeds its spread over seeds."""
    if difference.std is None:
        return "on one seed: no evidence either way"
    if abs(difference.mean) <= difference.std:
        return f"which is within the spread over seeds ({difference.std:.{decimals}f}): not told apart"
    return f"more than the spread over seeds ({difference.std:.{decimals}f})"


def extremes(values: Mapping[Name, float]) -> tuple[Name, Name]:
    """The names of the highest and of the lowest value."""
    return max(values, key=lambda name: values[name]), min(values, key=lambda name: values[name])
