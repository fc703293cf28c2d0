"""Several named inputs of a sample, such as an image and a vector of facts.

They lie one behind the other in one vector of float32, in the order of their names here. So all
runtimes see one tensor, and a user's network is given the parts by name. Whole numbers (numbers of
tokens, categories) are exact up to 2^24, and are not normalised.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import Count, Section

PLAIN = ("numpy", "torch", "torchvision")  # their kinds of arrays are numbers and nothing more
LARGEST = 2**24  # up to here, float32 has each whole number
Array = NDArray[Any]


class Input(Section):
    """One of the inputs."""

    shape: list[Count]  # of a sample; []: a number
    whole: bool = Field(default=False, exclude_if=lambda whole: not whole)  # given as int64

    @property
    def size(self) -> int:
        """How many numbers."""
        return prod(self.shape)


Inputs = Mapping[str, Input]


def total(inputs: Inputs) -> int:
    """How many numbers a sample has."""
    return sum(spec.size for spec in inputs.values())


def split(inputs: Inputs, x: Tensor) -> dict[str, Tensor]:
    """The inputs by name, [B, *shape], of a batch [B, total]; whole numbers are int64."""
    sizes = [spec.size for spec in inputs.values()]
    parts = torch.split(x, sizes, dim=1)
    by_name = {}
    for (name, spec), part in zip(inputs.items(), parts, strict=True):
        part = part.reshape(len(x), *spec.shape)
        by_name[name] = part.round().long() if spec.whole else part
    return by_name


def described(arrays: Mapping[str, Array]) -> dict[str, Input]:
    """The inputs of arrays [n, ...] by name."""
    inputs = {}
    for name, array in arrays.items():
        whole = array.dtype.kind in "iu" and not is_bytes(array)
        inputs[name] = Input(shape=list(array.shape[1:]), whole=whole)
    return inputs


def joined(
    inputs: Inputs, scaled: Collection[str], arrays: Mapping[str, Array], prefix: str
) -> Array:
    """The samples [n, total] as float32, or as float64 if an input is.

    `prefix` begins a message, behind it stands a name.

    `scaled`: the inputs that are bytes in training, which become numbers from 0 to 1. UserError for
    other names, shapes or kinds of numbers than in training, and for numbers that are not finite,
    or whole numbers that float32 can't hold.
    """
    if arrays.keys() != inputs.keys():
        names, allowed = ", ".join(arrays), ", ".join(inputs)
        raise UserError(f"{prefix.rstrip('.')} has the inputs {names}", allowed=allowed)
    n = len(next(iter(arrays.values()))) if all(a.ndim for a in arrays.values()) else 0
    columns = []
    for name, spec in inputs.items():
        array = arrays[name]
        kind = f"{prefix}{name} is {array.dtype} {list(array.shape)}"
        if array.dtype.kind not in "iufb" or array.dtype.itemsize > 8:
            raise UserError(kind, allowed="numbers of at most 64 bits")
        if array.shape != (n, *spec.shape) or not array.size:
            raise UserError(kind, allowed=str([n or "n", *spec.shape]))
        if is_bytes(array) != (name in scaled) or (spec.whole and array.dtype.kind not in "iu"):
            other = "whole numbers" if spec.whole else "numbers"
            allowed = "uint8" if name in scaled else f"{other} of another type than uint8"
            raise UserError(kind, allowed=f"{allowed}, as the training samples")
        if spec.whole and np.abs(array.astype(float)).max() > LARGEST:
            raise UserError(f"{kind}, with numbers beyond 2^24", allowed="-2^24 to 2^24")
        with np.errstate(over="ignore"):  # too large for float32: becomes infinite, and is refused
            narrow = array.reshape(n, -1).astype(np.float32)
        if not np.isfinite(narrow).all():
            raise UserError(f"{kind}, with numbers that are not finite", allowed="finite float32")
        wide = array.dtype == np.float64
        columns.append(narrow / 255 if name in scaled else array.reshape(n, -1) if wide else narrow)
    return np.concatenate(columns, axis=1)


def is_bytes(array: Array) -> bool:
    """Whether an input has bytes, which become numbers from 0 to 1."""
    return array.dtype == np.uint8


def moments(inputs: Inputs, x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each of the numbers of samples [n, total].

    A vector has its own for each number, an input of more axes one for all its numbers; whole
    numbers have 0 and 1. A constant has the deviation 1.
    """
    mean: list[float] = []
    std: list[float] = []
    parts = x.double().numpy()
    first = 0
    for spec in inputs.values():
        part = parts[:, first : first + spec.size]
        first += spec.size
        axes = None if len(spec.shape) > 1 else 0
        m, s = (np.broadcast_to(value, spec.size) for value in (part.mean(axes), part.std(axes)))
        constant = np.broadcast_to(part.min(axes) == part.max(axes), spec.size)
        mean += [0.0] * spec.size if spec.whole else m.tolist()
        std += [1.0] * spec.size if spec.whole else np.where(constant, 1.0, s).tolist()
    return tuple(mean), tuple(std)


def to_array(key: str, values: Any) -> Array:
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
            values = values.float() if values.dtype == torch.bfloat16 else values
        return np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # rows of unlike length; quantised
        raise UserError(
            f"{key} is no array: {str(error).splitlines()[0]}",
            allowed="what numpy.asarray takes",
        ) from None
