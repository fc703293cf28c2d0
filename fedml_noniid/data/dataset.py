"""A data set as tensors, and one file to keep it in."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedml_noniid.core.errors import UserError, closest, located
from fedml_noniid.data import precision, tensor_file
from fedml_noniid.data.inputs import Input, Inputs, moments, total
from fedml_noniid.data.strata import Strata, strata
from fedml_noniid.data.types import Floats

# The mean and the deviation of pixels from 0 to 1; None: those of each channel.
NORMALISATIONS = {"channel": None, "half": (0.5, 0.5), "none": (0.0, 1.0)}
TENSORS = ("train_x", "train_y", "test_x", "test_y")
OPTIONAL = ("train_owner", "test_owner", "embedding", "unseen_x", "unseen_y", "unseen_owner")
PIECE = 2**12  # samples that are copied at a time
LEAK = "LEAK: "  # begins the note that says which test samples training has seen


@dataclass(frozen=True, eq=False)
class Raw:
    """The result of a reader of files: samples as they are, neither scaled nor normalised."""

    # [n, channels, ...] or [n, features], uint8, float32, or float64 where that loses too much
    # (`precision`); [n, tokens] int32 for text
    train_x: Tensor
    train_y: Tensor  # [n] int64, in [0, C); or targets that are no classes, [n, t] float32
    test_x: Tensor
    test_y: Tensor
    classes: Sequence[str]  # or the names of the targets
    # the raw value that is 1 on the scale on which noise is given: 255 for images of 8 bits
    unit: float = 255
    # [n] int64: the owner of each sample (a writer, a user), numbered from 0
    train_owner: Tensor | None = None
    test_owner: Tensor | None = None
    # [vocabulary, width] float32, for text only: its tokens' vectors, never trained
    embedding: Tensor | None = None
    notes: Sequence[
        str
    ] = ()  # what a report has to say about the data; the note of a leak begins with LEAK
    # several inputs by name, which lie one behind the other in x [n, total]; empty for one input
    inputs: Inputs = field(default_factory=dict)
    # reads new samples by what these were made of, such as columns; None for another thing
    encode: Callable[[Any], Tensor | None] | None = None
    features: Sequence[str] = ()  # the names of the columns of x [n, features], for notes
    owner_names: Sequence[str] = ()  # by the owners' numbers; empty where they have no names
    # Reads the data anew without some owners, by name; None where that can't be done.
    without: Callable[[Sequence[str]], Any] | None = None
    # The samples of these owners, read as the others'. A class that no other has is below 0.
    unseen_x: Tensor | None = None
    unseen_y: Tensor | None = None
    unseen_owner: Tensor | None = None
    unseen_names: Sequence[str] = ()  # by number

    @property
    def has_classes(self) -> bool:
        """Whether the targets are classes; otherwise they are numbers or several labels."""
        return not self.train_y.is_floating_point()

    @cached_property
    def strata(self) -> Strata:
        """The classes, or what stands for them in partitions and splits."""
        ys = self.train_y.numpy(), self.test_y.numpy()
        return Strata(tuple(self.classes), *ys) if self.has_classes else strata(*ys, self.classes)


@dataclass(frozen=True, eq=False, kw_only=True)
class Dataset(Raw):
    """A data set in memory: raw samples, and how they are normalised, `(x.float() - mean) /
    std`."""

    name: str
    mean: tuple[float, ...]  # per channel, in raw units; empty for text, which is not normalised
    std: tuple[float, ...]  # as mean; 1 for a channel that is constant
    checksum: str = field(
        default="", init=False
    )  # SHA-256 over the tensors' bytes and the fields above, hexadecimal

    def __post_init__(self) -> None:
        object.__setattr__(self, "checksum", tensor_file.checksum(self._head, self._tensors))

    @staticmethod
    def from_raw(name: str, raw: Raw, normalise: object = "channel") -> Dataset:
        """The samples of a reader. `normalise` is one of NORMALISATIONS or [m, s].

        `channel`: each channel of the training samples, or each feature of samples [n, features],
        gets mean 0 and deviation 1; `half`: (x/unit - 0.5) / 0.5; `none`: x/unit; [m, s]: (x/unit -
        m) / s in every channel or feature. UserError for anything else.
        """
        mean, std = _scaling(raw, normalise)
        fields = vars(raw) | {
            "classes": tuple(raw.classes),
            "unit": float(raw.unit),
            "owner_names": tuple(raw.owner_names),
            "unseen_names": tuple(raw.unseen_names),
            "without": None if raw.without is None else partial(_without, name, raw, normalise),
            "notes": (*raw.notes, *_merged(raw, mean, std)),
        }
        return Dataset(name=name, mean=mean, std=std, **fields)

    @property
    def leak(self) -> str:
        """In words, what training sees of the test set with every method; "" if it sees nothing."""
        return "; ".join(note.removeprefix(LEAK) for note in self.notes if note.startswith(LEAK))

    @property
    def dtype(self) -> str:
        """The type of raw samples that loses nothing."""
        if not self.std:
            return "int32"
        return "float64" if self.train_x.dtype is torch.float64 else "float32"

    @property
    def scale(self) -> Tensor:
        """Per channel, what 1 on the scale of `unit` is after normalisation, [channels]; empty for
        text."""
        return torch.tensor([self.unit / std for std in self.std], dtype=torch.float32)

    def normalised(
        self, part: Literal["train", "test"], device: torch.device | str = "cpu"
    ) -> Tensor:
        """The samples of one part, normalised, on `device`.

        Tokens become float32 too, which holds them exactly.
        """
        raw = self.train_x if part == "train" else self.test_x
        return normalised(raw.to(device), self.mean, self.std)  # bytes travel: a quarter of floats

    def save(self, path: Path) -> None:
        """Writes the data set into one safetensors file, whole or not at all; see `read`."""
        # No part of the checksum, as no bit of a training depends on them.
        keys = [key for key in ("owner_names", "unseen_names") if getattr(self, key)]
        names = {key: getattr(self, key) for key in keys}
        tensor_file.write(Path(path), "dataset", self._head | names, self._tensors, self.checksum)

    @staticmethod
    def read(path: Path) -> Dataset:
        """The data set that `save` wrote. UserError if the file is missing or damaged."""
        return tensor_file.read(
            Path(path),
            "dataset",
            _dataset,
            what="a saved data set",
            origin="the prepare stage writes it",
            remedy="delete it and prepare it again",
        )

    @property
    def _head(self) -> dict[str, object]:
        keys = ("name", "classes", "mean", "std", "unit", "notes")
        inputs = {name: spec.model_dump() for name, spec in self.inputs.items()}
        return {key: getattr(self, key) for key in keys} | ({"inputs": inputs} if inputs else {})

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return {
            key: leaf for key in (*TENSORS, *OPTIONAL) if (leaf := getattr(self, key)) is not None
        }


def _without(name: str, raw: Raw, normalise: object, owners: Sequence[str]) -> Dataset:
    """The data set of a reader without some owners."""
    assert raw.without is not None, "the caller asks"
    return Dataset.from_raw(name, raw.without(owners), normalise)


def normalised(x: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """The raw samples `x` [n, channels, ...] as float32, normalised; as they are without `std`, as
    text is. float64 is centred before it becomes float32."""
    x = x.to(x.dtype if x.dtype is torch.float64 else torch.float32, copy=True)
    if not std:
        return x
    shape = (-1, *[1] * (x.ndim - 2))
    m, s = (
        torch.tensor(values, dtype=x.dtype, device=x.device).view(shape) for values in (mean, std)
    )
    return x.sub_(m).div_(s).float()


def _dataset(head: dict[str, Any], tensors: dict[str, Tensor]) -> Dataset:
    """The data set of a file. KeyError or TypeError for other heads and for missing tensors."""
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in head.items()
    }
    fields["inputs"] = {key: Input(**spec) for key, spec in head.get("inputs", {}).items()}
    fields |= {key: tensors[key] for key in TENSORS} | {key: tensors.get(key) for key in OPTIONAL}
    return Dataset(**fields)


def mean_and_deviation(normalise: object) -> tuple[float, float] | None:
    """m and s of `Dataset.from_raw`; None if the training samples decide.

    UserError if `normalise` is not allowed.
    """
    if isinstance(normalise, str) and normalise in NORMALISATIONS:
        return NORMALISATIONS[normalise]
    numbers = normalise if isinstance(normalise, list | tuple) else ()
    if len(numbers) == 2 and all(type(number) in (int, float) for number in numbers):
        mean, deviation = numbers
        if abs(mean) <= sys.float_info.max and 0 < deviation <= sys.float_info.max:
            return float(mean), float(deviation)
    names = ", ".join(NORMALISATIONS)
    raise UserError(
        value=normalise,
        allowed=f"{names}, or [mean, deviation] of pixels from 0 to 1 with a deviation above 0",
        meant=closest(normalise, NORMALISATIONS),
    )


def _scaling(raw: Raw, normalise: object) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) of `Dataset.from_raw`."""
    with located("normalise"):
        fixed = mean_and_deviation(normalise)
    if not raw.train_x.is_floating_point() and raw.train_x.dtype is not torch.uint8:
        if fixed is not None:
            allowed = "channel, the default: the samples are tokens, which are not normalised"
            raise UserError(path=("normalise",), value=normalise, allowed=allowed)
        return (), ()
    if raw.inputs:
        if fixed not in (None, NORMALISATIONS["none"]):
            allowed = "channel, or none: the samples have several inputs"
            raise UserError(path=("normalise",), value=normalise, allowed=allowed)
        n = total(raw.inputs)
        return moments(raw.inputs, raw.train_x) if fixed is None else ((0.0,) * n, (1.0,) * n)
    if fixed is None:
        return _moments(raw.train_x)
    channels = raw.train_x.shape[1]
    return (fixed[0] * raw.unit,) * channels, (fixed[1] * raw.unit,) * channels


def _merged(raw: Raw, mean: Sequence[float], std: Sequence[float]) -> list[str]:
    """A note on the features of which float32 holds fewer values, after they are normalised."""
    if not raw.train_x.is_floating_point():
        return []
    x = precision.some(raw.train_x.numpy())
    narrow = normalised(torch.from_numpy(x), mean, std).numpy()
    before, after = (precision.different(part).flatten() for part in (x, narrow))
    return [
        f"float32 tells only {after[i]} of {before[i]} different values apart in "
        f"{f'column {raw.features[i]!r}' if raw.features else f'number {i} of each sample'}, after "
        "`normalise`; subtract a constant, or remove what lies far off"
        for i in np.flatnonzero(precision.merged(x, narrow).flatten())
    ]


def _moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of samples [n, channels, ...]; 1 in place of a
    deviation of 0.

    uint8 is summed in whole numbers, so the result doesn't depend on the machine. NumPy sums floats
    in float64.
    """
    n = x.numel() // x.shape[1]
    axes = (0, *range(2, x.ndim))
    if x.is_floating_point() and x.ndim == 2 and x.shape[1] > 1:
        return _moments_of_features(x.numpy())
    if x.is_floating_point():
        wide = x.double().numpy()
        # Rounding may give a constant channel a tiny deviation.
        std = np.where(wide.min(axes) == wide.max(axes), 1.0, wide.std(axes))
        return tuple(wide.mean(axes).tolist()), tuple(std.tolist())
    total, squares = torch.zeros(2, x.shape[1], dtype=torch.int64)
    for chunk in torch.split(x, max(1, 2**24 // x[0].numel())):
        whole = chunk.to(torch.int32)
        total += whole.sum(axes)
        squares += whole.square_().sum(axes)
    sums = list(zip(total.tolist(), squares.tolist(), strict=True))
    return tuple(s / n for s, _ in sums), tuple(
        math.sqrt(n * q - s * s) / n or 1.0 for s, q in sums
    )


def _moments_of_features(x: Floats) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """As `_moments`, of features [n, d]: NumPy's bits, without a copy of all samples in float64."""
    n = len(x)

    def added(mean: Floats | float, power: int) -> Floats:
        """The sum of (row - mean)^power. NumPy adds rows in their order, here too."""
        sums = np.zeros((0, x.shape[1]))
        for piece in np.split(x, range(PIECE, n, PIECE)):
            terms: Floats = (piece.astype(np.float64) - mean) ** power
            sums = np.concatenate([sums, terms]).sum(0, keepdims=True)
        return sums.ravel()

    mean = added(0.0, 1) / n
    std = np.where(x.min(0) == x.max(0), 1.0, np.sqrt(added(mean, 2) / n))
    return tuple(mean.tolist()), tuple(std.tolist())
