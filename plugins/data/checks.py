"""Checks of a user's values against the data.

An error is one line that names the key, the value and what is allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator
from torch import Tensor, bfloat16

from fedml_noniid.plugins.core.errors import UserError, Where
from fedml_noniid.plugins.core.errors import known as known
from fedml_noniid.plugins.core.options import unknown

PLAIN = ("numpy", "torch", "torchvision")  # their kinds of arrays are numbers and nothing more


def refusal(key: str, value: object, allowed: str) -> UserError:
    """The error for `key: value`, to be raised by the caller."""
    return UserError(where=(key,), value=value, allowed=allowed)


def _class_name(value: object) -> object:
    if type(value) not in (int, str):
        raise UserError(value=value, allowed="the name of a class")
    return value


ClassName = Annotated[Any, AfterValidator(_class_name)]  # text, or a number that is its name


def class_numbers(where: Where, names: Sequence[str], classes: Sequence[object]) -> list[int]:
    """The numbers of classes by their names. UserError for another name, and for one twice."""
    for name in classes:
        unknown(where, str(name), names)
    numbers = [names.index(str(name)) for name in classes]
    if len({*numbers}) < len(numbers):
        raise UserError(where=where, value=classes, allowed="each class once")
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


def to_array(key: str, values: Any) -> NDArray[Any]:
    """The values as an array, on the CPU and without gradient.

    UserError for masked cells, for units and other meanings that numbers alone lack, and for what
    is no array.
    """
    if isinstance(values, list | tuple):
        values = [
            to_array(f"{key}[{i}]", value)
            if isinstance(value, list | tuple) or hasattr(value, "__array__")
            else value
            for i, value in enumerate(values)
        ]
    kind, package = type(values).__qualname__, type(values).__module__.partition(".")[0]
    own = isinstance(values, np.ndarray | Tensor) and package not in PLAIN
    if own or (package != "pandas" and (hasattr(values, "units") or hasattr(values, "unit"))):
        allowed = "its numbers alone, as a numpy.ndarray or a torch.Tensor"
        raise UserError(f"{key} is a {kind}, with units or another meaning", allowed=allowed)
    mask = np.asarray(values.mask if isinstance(values, np.ma.MaskedArray) else False)
    if mask.dtype == bool and mask.any():
        cell = ", ".join(map(str, np.argwhere(mask)[0]))
        what = f"{key}[{cell}]" if cell else key
        raise UserError(f"{what} is masked, so it has no value", allowed="fill or remove it")
    try:
        if isinstance(values, Tensor):
            values = values.detach().to_dense().cpu().resolve_conj().resolve_neg()
            values = values.float() if values.dtype == bfloat16 else values
        return np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # rows of unlike length; quantised
        raise UserError(
            f"{key} is no array: {str(error).splitlines()[0]}",
            allowed="what numpy.asarray takes",
        ) from None
