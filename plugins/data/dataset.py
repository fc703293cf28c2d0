"""A data set as tensors, and one file to keep it in."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from plugins.core.errors import UserError, nearest
from plugins.data.checks import is_finite
from plugins.data.files import write_whole

NORMALISATIONS = ("channel", "half", "none")
TENSORS = ("train_x", "train_y", "test_x", "test_y")
OPTIONAL = ("train_owner", "test_owner", "embedding")
LEAK = "LEAK: "  # how a note begins that says which test samples training has seen


class Raw(NamedTuple):
    """What a reader of files returns: samples as they are, neither scaled nor normalised."""

    train_x: Tensor  # [n, channels, ...] or [n, features], uint8 or float32; [n, tokens] int32 for text
    train_y: Tensor  # [n] int64, in [0, C)
    test_x: Tensor
    test_y: Tensor
    classes: Sequence[str]
    unit: float = 255  # the raw value that is 1 on the scale on which noise is given: 255 for images of 8 bits
    train_owner: Tensor | None = None  # [n] int64: whose sample it is (a writer, a user), numbered from 0
    test_owner: Tensor | None = None
    embedding: Tensor | None = None  # [vocabulary, width] float32: text only, the vectors of its tokens, never trained
    notes: Sequence[str] = ()  # what a report has to say about the data; a leak's begins with LEAK


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set in memory; `x_normalised = (x.float() - mean) / std`. Tensors and `unit` as in `Raw`."""

    name: str
    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]  # per channel, in raw units; empty for text, which is not normalised
    std: tuple[float, ...]  # as mean; 1 for a channel that is constant
    unit: float
    train_owner: Tensor | None
    test_owner: Tensor | None
    embedding: Tensor | None
    notes: tuple[str, ...]
    checksum: str = field(default="", init=False)  # SHA-256 over the tensors' bytes and the fields above, hexadecimal

    def __post_init__(self) -> None:
        object.__setattr__(self, "checksum", _checksum(self))

    @staticmethod
    def of(name: str, raw: Raw, normalise: object = "channel") -> Dataset:
        """The samples of a reader, to be normalised by one of NORMALISATIONS or by numbers.

        `channel`: to mean 0 and deviation 1 of each channel of the training samples; `half`: (x/unit - 0.5) / 0.5;
        `none`: x/unit; [m, s]: (x/unit - m) / s in every channel. UserError for anything else.
        """
        mean, std = _scaling(raw, normalise)
        tensors = {key: getattr(raw, key) for key in (*TENSORS, *OPTIONAL)}
        return Dataset(
            name=name, classes=tuple(raw.classes), mean=mean, std=std, unit=float(raw.unit), notes=tuple(raw.notes),
            **tensors,
        )  # fmt: skip

    @property
    def leak(self) -> str:
        """What of the test set training sees whatever the method, in words; "" if nothing."""
        return "; ".join(note.removeprefix(LEAK) for note in self.notes if note.startswith(LEAK))

    @property
    def scale(self) -> Tensor:
        """Per channel, what 1 on the scale of `unit` is after normalisation, [channels]; empty for text."""
        return torch.tensor([self.unit / std for std in self.std], dtype=torch.float32)

    def normalised(self, part: Literal["train", "test"], device: torch.device | str = "cpu") -> Tensor:
        """The samples of one part, normalised, on `device`; float32 also for tokens, which it holds exactly."""
        raw = {"train": self.train_x, "test": self.test_x}[part]
        # The raw bytes travel: a quarter of the floats.
        x = raw.to(device).to(torch.float32, copy=True)
        if not self.std:
            return x
        shape = (-1, *[1] * (x.ndim - 2))
        mean, std = (torch.tensor(v, dtype=torch.float32, device=device).view(shape) for v in (self.mean, self.std))
        return x.sub_(mean).div_(std)

    def save(self, path: Path) -> None:
        """Writes the data set into one safetensors file, whole or not at all; see `read`."""
        metadata = {"dataset": json.dumps(_head(self)), "checksum": self.checksum}
        tensors = {key: leaf.contiguous() for key, leaf in _tensors(self).items()}
        write_whole(Path(path), safetensors.torch.save(tensors, metadata))

    @staticmethod
    def read(path: Path) -> Dataset:
        """The data set that `save` wrote. UserError if the file is missing, damaged, or not what was written."""
        path = Path(path)
        if not path.is_file():
            raise UserError(f"{path}: there is no such file; the prepare stage writes it")
        try:
            with safetensors.safe_open(path, "pt") as file:
                metadata = file.metadata()
                optional = [key for key in OPTIONAL if key in set(file.keys())]
                tensors = {key: file.get_tensor(key) for key in (*TENSORS, *optional)}
            head: dict[str, Any] = json.loads(metadata["dataset"])
            fields = {key: tuple(value) if isinstance(value, list) else value for key, value in head.items()}
            found, expected = Dataset(**dict.fromkeys(OPTIONAL) | tensors | fields), metadata["checksum"]
        except (OSError, safetensors.SafetensorError, KeyError, TypeError, ValueError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"{path}: damaged, or not a saved data set ({reason}); delete it and prepare it again"
            ) from None
        if found.checksum != expected:
            raise UserError(f"{path}: damaged (its content doesn't match its checksum); delete it and prepare it again")
        return found


def mean_and_deviation(normalise: object) -> tuple[float, float] | None:
    """m and s of `Dataset.of`; None for those of the training samples. UserError for what it doesn't take."""
    match normalise:
        case "channel":
            return None
        case "half":
            return 0.5, 0.5
        case "none":
            return 0.0, 1.0
        case [mean, deviation] if is_finite(mean) and is_finite(deviation) and deviation > 0:
            return float(mean), float(deviation)
    raise UserError(
        f"normalise {normalise!r} is refused{nearest(str(normalise), NORMALISATIONS)}; allowed: "
        f"{', '.join(NORMALISATIONS)}, or [mean, deviation] of pixels from 0 to 1 with a deviation above 0"
    )


def _scaling(raw: Raw, normalise: object) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(mean, std) of `Dataset.of`."""
    given = mean_and_deviation(normalise)
    if not raw.train_x.is_floating_point() and raw.train_x.dtype is not torch.uint8:
        return (), ()
    if given is None:
        return _moments(raw.train_x)
    channels = raw.train_x.shape[1]
    return (given[0] * raw.unit,) * channels, (given[1] * raw.unit,) * channels


def _moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each channel of samples [n, channels, ...]; 1 in place of a deviation of 0.

    Sums of whole numbers for uint8, so that the result doesn't depend on the machine; NumPy's of float64 otherwise.
    """
    n = x.numel() // x.shape[1]
    axes = (0, *range(2, x.ndim))
    if x.is_floating_point():
        wide = x.double().numpy()
        return tuple(wide.mean(axes).tolist()), tuple(std or 1.0 for std in wide.std(axes).tolist())
    total, squares = torch.zeros(2, x.shape[1], dtype=torch.int64)
    for chunk in torch.split(x, max(1, 2**24 // x[0].numel())):
        whole = chunk.to(torch.int32)
        total += whole.sum(axes)
        squares += whole.square_().sum(axes)
    sums = list(zip(total.tolist(), squares.tolist(), strict=True))
    return tuple(s / n for s, _ in sums), tuple(math.sqrt(n * q - s * s) / n or 1.0 for s, q in sums)


def _head(dataset: Dataset) -> dict[str, object]:
    return {key: getattr(dataset, key) for key in ("name", "classes", "mean", "std", "unit", "notes")}


def _tensors(dataset: Dataset) -> dict[str, Tensor]:
    found = {key: getattr(dataset, key) for key in (*TENSORS, *OPTIONAL)}
    return {key: leaf for key, leaf in found.items() if leaf is not None}


def _checksum(dataset: Dataset) -> str:
    digest = hashlib.sha256(json.dumps(_head(dataset), sort_keys=True).encode())
    for key, tensor in _tensors(dataset).items():
        digest.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(np.ascontiguousarray(tensor.numpy()).data)
    return digest.hexdigest()
