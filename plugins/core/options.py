"""Ranges of hyper-parameters, as annotations. Words are `Literal`s. `plugins.recipes` checks both."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from fedml_noniid.plugins.core.errors import UserError


class RecipeError(UserError):
    """A recipe that can't be composed, with the reason."""


@dataclass(frozen=True)
class Range:
    """An interval of numbers; `open` names the ends that do not belong to it: "", "(", ")" or "()"."""

    low: float = -math.inf
    high: float = math.inf
    open: str = ""

    def __contains__(self, value: float) -> bool:
        above = value > self.low if "(" in self.open else value >= self.low
        return above and (value < self.high if ")" in self.open else value <= self.high)

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"be above {self.low:g}" if "(" in self.open else f"be at least {self.low:g}"
        ends = ("(" if "(" in self.open else "["), (")" if ")" in self.open else "]")
        return f"lie in {ends[0]}{self.low:g}, {self.high:g}{ends[1]}"


Positive = Annotated[float, Range(0, open="(")]
NonNegative = Annotated[float, Range(0)]
Fraction = Annotated[float, Range(0, 1)]
Momentum = Annotated[float, Range(0, 1, open=")")]
Decay = Annotated[float, Range(0, 1, open="(")]
Count = Annotated[int, Range(1)]
CountOrNone = Annotated[int, Range(0)]
