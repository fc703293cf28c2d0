"""Checks of a user's values.

An error is one line that names the key, the value and what is allowed.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from typing import TypeGuard

from fedml_noniid.plugins.core.errors import UserError, nearest, shown


def refusal(key: str, value: object, allowed: str) -> UserError:
    """The error for `key: value`, to be raised by the caller. Long values are cut."""
    return UserError(f"{key}={shown(value)} is refused; allowed: {allowed}")


def whole_number(
    key: str, value: object, low: int, high: int | None = None, because: str = ""
) -> int:
    """`value` as an int in [low, high].

    UserError for other values and for a bool; `because` explains `high`.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if number >= low and (high is None or number <= high):
            return number
    if high is not None and high < low:
        raise refusal(key, value, f"none{because}")
    raise refusal(
        key, value, f"a whole number from {low} up" if high is None else f"{low} to {high}{because}"
    )


def real_number(key: str, value: object, fits: Callable[[float], bool], allowed: str) -> float:
    """`value` as a finite float that `fits`.

    UserError for other values, for a bool and for text.
    """
    if is_finite(value) and fits(number := float(value)):
        return number
    raise refusal(key, value, allowed)


def is_finite(value: object) -> TypeGuard[float]:
    """Whether `value` is a finite number that a float can hold. A bool is not a number."""
    try:
        return (
            isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(float(value))
        )
    except OverflowError:  # a whole number too large for a float
        return False


def known(kind: str, name: object, allowed: Iterable[str]) -> str:
    """`name`, if it is one of `allowed`. UserError with the nearest match otherwise."""
    names = list(allowed)
    if isinstance(name, str) and name in names:
        return name
    raise UserError(
        f"{kind} {name!r} is unknown{nearest(str(name), names)}; allowed: "
        f"{', '.join(names) or 'none'}"
    )


def options_of(
    function: Callable[..., object],
    owner: str,
    options: Mapping[str, object],
    also: Iterable[str] = (),
) -> None:
    """UserError unless `options` are keyword-only parameters of `function`; those without a default
    must be there.

    `also`: further options that the error names as allowed.
    """
    takes = {
        p.name: p
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }
    for key in options:
        known(f"{owner}: option", key, dict.fromkeys([*takes, *sorted(also)]))
    for key, parameter in takes.items():
        if parameter.default is parameter.empty and key not in options:
            raise UserError(f"{owner}: {key} is missing; it has no default")
