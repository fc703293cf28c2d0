"""Checks of a user's values against the data.

An error is one line that names the key, the value and what is allowed.
"""

from __future__ import annotations

from numbers import Integral

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.core.errors import known as known


def refusal(key: str, value: object, allowed: str) -> UserError:
    """The error for `key: value`, to be raised by the caller."""
    return UserError(where=(key,), value=value, allowed=allowed)


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
