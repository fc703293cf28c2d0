"""A user's own samples, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.checks import known, refusal
from fedml_noniid.plugins.data.dataset import Raw
from fedml_noniid.plugins.data.types import Ints

Array = NDArray[Any]
Arrays = Mapping[str, Array]

LAYOUT = "train.npz and test.npz, each with x, y and, if samples have owners, client (np.savez(file, x=..., y=...))"


def arrays(root: Path) -> Raw:
    """<root>/train.npz and <root>/test.npz, as np.savez writes them, never pickled objects.

    x: samples [n, features], grey images [n, h, w] or images [n, channels, h, w]; uint8 (0 to 255), or floats of 16, 32
    or 64 bits, which become float32 and have the unit 1. y: labels [n], whole numbers 0 to C - 1, each with a training
    sample. client (in both files or in none): owners [n], whole numbers or text, numbered in sorted order over both
    files. classes (in train.npz only, or not): the names of the classes, text [C]. Raises UserError for anything else.
    """
    files = root / "train.npz", root / "test.npz"
    train, test = _read(files[0], ("x", "y", "client", "classes")), _read(files[1], ("x", "y", "client"))
    train_x, test_x = _samples(files[0], train["x"]), _samples(files[1], test["x"])
    if train_x.shape[1:] != test_x.shape[1:] or train_x.dtype != test_x.dtype:
        kinds = [f"{x.dtype} {list(x.shape[1:])}".removeprefix("torch.") for x in (train_x, test_x)]
        raise UserError(f"{files[1]}: x holds samples of {kinds[1]}, those of {files[0].name} are {kinds[0]}")
    train_y, test_y = _labels(files[0], train), _labels(files[1], test)
    names = _classes(files, train_y, test_y, train.get("classes"))
    unit = 255.0 if train_x.dtype is torch.uint8 else 1.0
    owners = _owners(files, train, test)
    return Raw(train_x, torch.from_numpy(train_y), test_x, torch.from_numpy(test_y), names, unit, *owners)


def _read(file: Path, allowed: Sequence[str]) -> Arrays:
    """The arrays of one file; x and y are required."""
    if not file.exists():
        raise UserError(f"{file}: there is no such file; needed: {LAYOUT}")
    with file.open("rb") as stream:
        try:
            # No objects, since they are pickled: unpickling a file can run any program.
            opened = np.load(stream, allow_pickle=False)
            if not isinstance(opened, np.lib.npyio.NpzFile):
                raise UserError(f"{file}: is one array, not an archive of arrays; needed: {LAYOUT}")
            for key in opened.files:
                known(f"{file}: array", key, allowed)
            found = {key: opened[key] for key in opened.files}
        except UserError:
            raise
        except Exception as error:  # on damaged files, the many parsers of NumPy and zipfile raise errors of many types
            objects = "Object arrays" in str(error)
            reason = "it holds Python objects" if objects else "damaged, too large, or another kind of file"
            raise UserError(f"{file}: can't be read as arrays ({reason}); needed: {LAYOUT}") from None
    for key in ("x", "y", *found):
        if key not in found:
            raise UserError(f"{file}: holds no array {key!r}; needed: {LAYOUT}")
        if not isinstance(found[key], np.ndarray):
            raise UserError(f"{file}: {key} isn't an array; needed: {LAYOUT}")
    return found


def _kind(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _check(file: Path, key: str, array: Array, kinds: str, n: int, allowed: str) -> None:
    """UserError unless `array` is [n], and its type is one of NumPy's `kinds`."""
    if array.dtype.kind not in kinds or array.shape != (n,):
        raise UserError(f"{file}: {key} is {_kind(array)}; allowed: {allowed}")


def _samples(file: Path, x: Array) -> Tensor:
    """x as [n, features] or [n, channels, h, w], uint8 or float32."""
    if x.dtype != np.uint8 and (x.dtype.kind != "f" or x.dtype.itemsize > 8):
        raise UserError(f"{file}: x is {_kind(x)}; allowed: uint8 (0 to 255), float16, float32, float64")
    if x.ndim not in (2, 3, 4) or x.size == 0:
        raise UserError(
            f"{file}: x is {_kind(x)}; allowed: [n, features], [n, h, w], [n, channels, h, w], none of them 0"
        )
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):  # too large for float32: becomes infinite, and is refused
            x = x.astype(np.float32)
        finite = np.isfinite(x)
        if not finite.all():
            where = np.unravel_index(int(finite.argmin()), x.shape)
            raise refusal(f"{file}: x[{', '.join(map(str, where))}]", float(x[where]), "finite numbers of float32")
    if x.ndim == 3:
        x = x[:, None]
    return torch.from_numpy(np.array(x, order="C"))


def _labels(file: Path, part: Arrays) -> Ints:
    y, n = part["y"], len(part["x"])
    _check(file, "y", y, "iu", n, f"whole numbers [{n}], one for each of x")
    if y.min() < 0 or y.max() >= 2**31:
        where = int(np.argmax((y < 0) | (y >= 2**31)))
        raise refusal(f"{file}: y[{where}]", y[where].item(), "whole numbers from 0 up")
    return y.astype(np.int64)


def _classes(files: tuple[Path, Path], train: Ints, test: Ints, names: Array | None) -> list[str]:
    """The names of the classes. UserError unless each class has a training sample."""
    if test.max() > train.max():
        raise refusal(f"{files[1]}: y[{test.argmax()}]", int(test.max()), f"0 to {train.max()}, as in {files[0].name}")
    count, present = int(train.max()) + 1, np.unique(train)
    # Up to here lie the five lowest missing classes, if so many are missing.
    missing = np.setdiff1d(np.arange(min(count, len(present) + 5)), present)[:5]
    if len(missing):
        said = ", ".join(map(str, missing))
        raise UserError(f"{files[0]}: y goes up to {count - 1}, but no sample has {said}; every class needs some")
    if count < 2:
        raise UserError(f"{files[0]}: y is always 0; at least 2 classes are needed")
    if names is None:
        return [str(label) for label in range(count)]
    if names.dtype.kind != "U" or names.shape != (count,) or len(np.unique(names)) != count:
        raise UserError(f"{files[0]}: classes is {_kind(names)}; allowed: text [{count}], a name for each class of y")
    return [str(name) for name in names]


def _owners(files: tuple[Path, Path], train: Arrays, test: Arrays) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """client of both files as numbers from 0."""
    parts = dict(zip(files, (train, test), strict=True))
    lacking = [file for file, part in parts.items() if "client" not in part]
    if len(lacking) == 2:
        return None, None
    if lacking:
        (other,) = set(files) - set(lacking)
        raise UserError(f"{lacking[0]}: holds no array 'client', but {other.name} does; allowed: in both or in none")
    for file, part in parts.items():
        n = len(part["x"])
        _check(file, "client", part["client"], "iuU", n, f"whole numbers or text [{n}]")
    found = train["client"], test["client"]
    if (found[0].dtype.kind == "U") != (found[1].dtype.kind == "U"):
        raise UserError(f"{files[1]}: client is {_kind(found[1])}, in {files[0].name} it is {_kind(found[0])}")
    # As Python's own values: NumPy has no type for both int64 and uint64.
    both = np.concatenate([client.astype(object) for client in found])
    owner = torch.from_numpy(np.unique(both, return_inverse=True)[1])
    return owner[: len(found[0])], owner[len(found[0]) :]
