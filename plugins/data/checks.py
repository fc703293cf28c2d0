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


def whole_number(key: str, value: object, low: int, high: int, because: str = "") -> int:
    """`value` as an int in [low, high].

    UserError for other values and for a bool; `because` explains `high`.
    """
    whole = None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
    if whole is not None and low <= whole <= high:
        return whole
    allowed = f"{low} to {high}" if low <= high else "none"
    raise refusal(key, value, f"{allowed}{because}")
