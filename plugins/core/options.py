"""Ranges of options, as annotations of the fields of a dataclass, and their check.

Words are `Literal`s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from fedml_noniid.plugins.core.errors import UserError, nearest, shown


class RecipeError(UserError):
    """A recipe that can't be composed, with the reason."""


@dataclass(frozen=True)
class Range:
    """An interval of numbers; `open` names the ends that do not belong to it: "", "(", ")" or
    "()"."""

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

_KINDS = {float: "a finite number", int: "a whole number", bool: "true or false", str: "text"}


def hints(kind: type) -> dict[str, Any]:
    """The fields of a dataclass, each with its type and ranges."""
    found = get_type_hints(kind, include_extras=True)
    return {field.name: found[field.name] for field in dataclasses.fields(kind) if field.init}


def fault(hint: Any, value: object) -> str:
    """What is wrong with a value of a field, as the rest of a sentence; "" if nothing is."""
    if get_origin(hint) is Literal:
        words = get_args(hint)
        if type(value) is not str:
            return "must be text"
        return (
            ""
            if value in words
            else f"is unknown{nearest(value, words)}; allowed: {', '.join(words)}"
        )
    if get_origin(hint) is tuple:
        each = get_args(hint)[0]
        if not isinstance(value, tuple | list):
            return "must be a list"
        return next(
            (f"has {shown(one)}, which {wrong}" for one in value if (wrong := fault(each, one))), ""
        )
    plain, *ranges = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if plain not in _KINDS:  # of a user's own class, which checks it itself
        return ""
    number = plain is float and isinstance(value, int | float) and not isinstance(value, bool)
    if not (_finite(value) if number else type(value) is plain):  # type: ignore[arg-type]  # a number
        return f"must be {_KINDS[plain]}"
    return next((f"must {allowed}" for allowed in ranges if value not in allowed), "")


def check_options(
    where: str, kind: type, values: Mapping[str, object], also: Iterable[str] = ()
) -> None:
    """UserError unless `values` fit the fields of a dataclass.

    `also`: further keys that the error names as allowed.
    """
    known = hints(kind)
    for key, value in values.items():
        if key not in known:
            allowed = ", ".join([*known, *also]) or "none"
            raise UserError(
                f"{where}: unknown option {key!r}{nearest(str(key), known)}; allowed: {allowed}"
            )
        if wrong := fault(known[key], value):
            raise UserError(f"{where}: {key} = {shown(value)} {wrong}")
    absent = dataclasses.MISSING
    for field in dataclasses.fields(kind):
        if (
            field.name in known
            and field.name not in values
            and field.default is field.default_factory is absent
        ):
            raise UserError(f"{where}: {field.name} is missing; it has no default")


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number too large for a float
        return False
