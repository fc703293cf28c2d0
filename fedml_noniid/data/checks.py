"""Checks of a user's values against the data.

An error is one line that names the key, the value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Annotated, Any

from pydantic import AfterValidator

from fedml_noniid.core.errors import KeyPath, UserError
from fedml_noniid.core.errors import known as known
from fedml_noniid.core.options import unknown


def refusal(key: str, value: object, allowed: str) -> UserError:
    """The error for `key: value`, to be raised by the caller."""
    return UserError(path=(key,), value=value, allowed=allowed)


def _class_name(value: object) -> object:
    if type(value) not in (int, str):
        raise UserError(value=value, allowed="the name of a class")
    return value


ClassName = Annotated[Any, AfterValidator(_class_name)]  # text, or a number that is its name


def class_numbers(path: KeyPath, names: Sequence[str], classes: Sequence[object]) -> list[int]:
    """The numbers of classes by their names. UserError for another name, and for one twice."""
    for name in classes:
        unknown(path, str(name), names)
    numbers = [names.index(str(name)) for name in classes]
    if len({*numbers}) < len(numbers):
        raise UserError(path=path, value=classes, allowed="each class once")
    return numbers


def whole_number(key: str, value: object, low: int, high: int, because: str = "") -> int:
    """`value` as an int in [low, high].

    UserError for other values and for a bool; `because` explains `high`.
    """
    whole = None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
    if whole is not None and low <= whole <= high:
        return whole
    allowed = f"{low} to {high}" if low <= high else "none"
    raise refusal(key, value, f"{allowed}{because}")
