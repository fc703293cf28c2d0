"""Partitions of a user's own: index lists, or a function that makes them, and their checks.

A function gets what it has parameters for, by name: `labels` [n] (strata, where targets are no
classes), `n_clients`, `rng` (a generator of NumPy, seeded by the experiment's seed), `owners` [n]
and `samples` [n, ...]. All other parameters are options. It returns a list of arrays, for each
client its positions in `labels`. Positions in no array are left out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.inputs import to_array
from fedml_noniid.data.streams import stream
from fedml_noniid.data.types import Ints
from fedml_noniid.own_code import call

FILLED = ("labels", "n_clients", "rng", "owners", "samples")  # what a function may ask for
Function = Callable[..., Any]


def asks_for(function: Function) -> list[str]:
    """Which of FILLED a function has parameters for."""
    return [name for name in FILLED if name in inspect.signature(function).parameters]


def assigned(
    function: Function, values: Mapping[str, Any], seed: int, options: Mapping[str, Any]
) -> list[Ints]:
    """The positions of each client, ascending. `values`: those of FILLED without `rng`.

    The function is called twice. UserError unless both results are the same partition.
    """
    name, asked = f"{getattr(function, '__name__', type(function).__name__)}()", asks_for(function)

    def once() -> tuple[Ints, ...]:
        arguments = {**values, "rng": stream(seed, "partition")}
        filled = {key: _locked(arguments[key]) for key in asked}
        lists = call(f"partition {name}", function, **filled, **options)
        return checked(lists, len(values["labels"]), name)

    first, second = once(), once()
    if len(first) != values["n_clients"]:
        allowed = f"{values['n_clients']}, one for each client"
        raise UserError(f"{name} returned {len(first)} arrays", allowed=allowed)
    if not all(map(np.array_equal, first, second)) or len(first) != len(second):
        raise UserError(
            f"{name} returned another partition when it was called again with the same arguments; "
            "draw from `rng` only, and keep nothing from call to call"
        )
    return [*first]


def _locked(value: Any) -> Any:
    """A copy of an array that can't be changed; any other value as it is."""
    if not isinstance(value, np.ndarray):
        return value
    copy = value.copy()
    copy.flags.writeable = False
    return copy


def checked(indices: Any, n: int, name: str = "indices") -> tuple[Ints, ...]:
    """Index lists, each ascending. `name` begins a message.

    UserError unless each of `n` samples is in one list at most, and no list is empty.
    """
    is_listed = isinstance(indices, Iterable) and not isinstance(indices, str | Mapping)
    if not is_listed or not (parts := list(indices)):
        raise UserError(path=(name,), value=indices, allowed="a list of arrays, one per client")
    arrays = []
    for k, part in enumerate(parts):
        positions = to_array(f"{name}[{k}]", part)
        is_whole = positions.ndim == 1 and positions.dtype.kind in "iu" and len(positions) > 0
        if not is_whole or positions.min() < 0 or positions.max() >= n:
            allowed = f"positions in the training set, whole numbers from 0 to {n - 1}"
            raise UserError(path=(name, k), value=part, allowed=allowed)
        arrays.append(np.sort(positions).astype(np.int64))
    times = np.bincount(np.concatenate(arrays))
    if times.max() > 1:
        raise UserError(f"{name}: {times.argmax()} is there {times.max()} times; allowed: once")
    return tuple(arrays)
