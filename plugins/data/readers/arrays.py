"""A user's own samples, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.checks import known, refusal
from fedml_noniid.plugins.data.dataset import Raw
from fedml_noniid.plugins.data.readers import user_data

Array = NDArray[Any]
Arrays = Mapping[str, Array]

LAYOUT = (
    "train.npz and test.npz, each with x, y and, if samples have owners, client "
    "(np.savez(file, x=..., y=...))"
)
CHANNELS = (1, 3, 4)  # of grey images, of RGB, and of RGB with a fourth channel
BYTES = 16  # images of floats that go further have the scale of bytes, not that of 0 to 1


class _Part(NamedTuple):
    """The arrays of the training set or of the test set, and the words for them in messages."""

    file: Path | None  # None for arrays in memory
    arrays: Arrays
    names: Mapping[str, str] = {}  # key -> name in a message, in memory

    def where(self, key: str) -> str:
        name = self.names.get(key, key)
        return name if self.file is None else f"{self.file}: {name}"

    @property
    def short(self) -> str:
        """The part in a message on the other one."""
        return self.names["x"] if self.file is None else self.file.name


def arrays(
    root: Path,
    *,
    layout: Literal["auto", "CHW", "HWC"] = "auto",
    test_share: user_data.Share | None = None,
) -> Raw:
    """<root>/train.npz and <root>/test.npz, as np.savez writes them, never pickled objects.

    x: samples [n, features], grey images [n, h, w] or images with channels; uint8 (0 to 255), or
    floats of 16, 32 or 64 bits, which become float32 and have the unit 1. y: labels [n], whole
    numbers or text, numbered in sorted order; each test label has a training sample. client (in
    both files or in none): owners [n], whole numbers or text, numbered in sorted order over both
    files. classes (in train.npz only, or not): text [C], the names of the labels 0 to C - 1; for
    labels of text, their order.

    `layout` of four axes: CHW is [n, channels, h, w], HWC is [n, h, w, channels]. `auto` takes the
    axis of 1, 3 or 4 for the channels, and refuses shapes that may be both. Without test.npz, the
    share `test_share` (0.2) of the training samples is the test set, see `user_data.cut`. Raises
    UserError for anything else.
    """
    train, test = root / "train.npz", root / "test.npz"
    parts = [_Part(train, _read(train, ("x", "y", "client", "classes")))]
    if test.exists():
        parts.append(_Part(test, _read(test, ("x", "y", "client"))))
    return _raw(parts, layout, test_share)


def of_arrays(
    train_x: Array,
    train_y: Array,
    test_x: Array | None = None,
    test_y: Array | None = None,
    owner: Array | None = None,
    classes: Sequence[str] | None = None,
    *,
    test_owner: Array | None = None,
    layout: Literal["auto", "CHW", "HWC"] = "auto",
    test_share: user_data.Share | None = None,
) -> Raw:
    """As `arrays`, of arrays in memory; `owner` and `test_owner` are `client`.

    UserError as there.
    """
    names = None if classes is None else np.array(classes)
    given = {"train_x": train_x, "train_y": train_y, "owner": owner, "classes": names}
    parts = [_in_memory(given)]
    given = {"test_x": test_x, "test_y": test_y, "test_owner": test_owner}
    if any(array is not None for array in given.values()):
        for key in ("test_x", "test_y"):
            if given[key] is None:
                raise UserError(
                    f"{key} is missing; allowed: test_x and test_y, or none of the test set"
                )
        parts.append(_in_memory(given))
    return _raw(parts, layout, test_share)


def new_samples(x: Array, train_x: Tensor, layout: str) -> Tensor:
    """More samples of a data set that `of_arrays` made: as its `train_x`. UserError as there."""
    part = _Part(None, {"x": x}, {"x": "test_x"})
    found, _ = _samples(part, layout)
    _alike(_Part(None, {}, {"x": "train_x"}), part, train_x, found)
    return found


def _in_memory(given: Mapping[str, object]) -> _Part:
    """The part of the arrays that aren't None. UserError for what isn't an array."""
    keys = dict(zip(given, ("x", "y", "client", "classes"), strict=False))
    found = {}
    for name, value in given.items():
        if value is None:
            continue
        if not isinstance(value, np.ndarray):
            raise UserError(f"{name} is a {type(value).__name__}; allowed: a NumPy array")
        if value.dtype == object and all(isinstance(v, str) for v in value.flat):
            value = value.astype(str)  # pandas gives text as Python objects
        found[keys[name]] = value
    return _Part(None, found, {key: name for name, key in keys.items()})


def _raw(parts: Sequence[_Part], layout: str, test_share: float | None) -> Raw:
    names = [part.where("x") for part in parts]
    # An option that is refused comes before a mistake in the arrays.
    user_data.fraction_for_test(test_share, names[-1] if len(parts) > 1 else None)
    read = [_samples(part, layout) for part in parts]
    xs = [x for x, _ in read]
    if len(parts) > 1:
        _alike(parts[0], parts[1], xs[0], xs[1])
    rows = user_data.rows_of(_labels(parts), _owners(parts), test_share, names)
    unit = 255.0 if xs[0].dtype is torch.uint8 else 1.0
    return rows.raw(xs, unit, list(dict.fromkeys(note for _, notes in read for note in notes)))


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
        except Exception as error:  # of any kind: parsers of NumPy and zipfile, on damaged files
            objects = "Object arrays" in str(error)
            reason = (
                "it holds Python objects"
                if objects
                else "damaged, too large, or another kind of file"
            )
            raise UserError(
                f"{file}: can't be read as arrays ({reason}); needed: {LAYOUT}"
            ) from None
    for key in ("x", "y", *found):
        if key not in found:
            raise UserError(f"{file}: holds no array {key!r}; needed: {LAYOUT}")
        if not isinstance(found[key], np.ndarray):
            raise UserError(f"{file}: {key} isn't an array; needed: {LAYOUT}")
    return found


def _kind(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _samples(part: _Part, layout: str) -> tuple[Tensor, list[str]]:
    """x as [n, features] or [n, channels, h, w], uint8 or float32, and notes."""
    x, where = part.arrays["x"], part.where("x")
    if x.dtype != np.uint8 and (x.dtype.kind != "f" or x.dtype.itemsize > 8):
        raise UserError(
            f"{where} is {_kind(x)}; allowed: uint8 (0 to 255), float16, float32, float64"
        )
    if x.ndim not in (2, 3, 4) or x.size == 0:
        raise UserError(
            f"{where} is {_kind(x)}; allowed: [n, features], [n, h, w], [n, channels, h, w] or "
            "[n, h, w, channels], "
            "none of them 0"
        )
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):  # too large for float32: becomes infinite, and is refused
            x = x.astype(np.float32)
        finite = np.isfinite(x)
        if not finite.all():
            place = np.unravel_index(int(finite.argmin()), x.shape)
            raise refusal(
                f"{where}[{', '.join(map(str, place))}]",
                float(x[place]),
                "finite numbers of float32",
            )
    notes = []
    if x.ndim == 4:
        if _channels_last(where, x, layout):
            if layout == "auto":
                notes.append(
                    f"images read as [h, w, channels]: each was {list(x.shape[1:])}, now channels "
                    "are first"
                )
            x = np.moveaxis(x, 3, 1)
    elif layout != "auto":
        raise refusal(
            "layout",
            layout,
            f"auto, since {where} has {x.ndim} axes; images with channels have four",
        )
    if x.ndim >= 3 and x.dtype == np.float32 and x.max() > 1:
        notes.append(
            f"images of floats from {x.min():g} to {x.max():g}: the scale of `noise` and of "
            "normalise half, none and [mean, deviation] takes 1 for white; write bytes (uint8) or "
            "values from 0 to 1 to use these"
        )
    return torch.from_numpy(np.array(x[:, None] if x.ndim == 3 else x, order="C")), notes


def _channels_last(where: str, x: Array, layout: str) -> bool:
    """Whether x is [n, h, w, channels]. UserError if it may be that or not."""
    if layout != "auto":
        return layout == "HWC"
    first, last = x.shape[1] in CHANNELS, x.shape[3] in CHANNELS
    if first == last:
        raise UserError(
            f"{where} is {_kind(x)}: the channels may be axis 1 or axis 3; needed: layout: CHW for "
            "[n, channels, h, w], or HWC for [n, h, w, channels]"
        )
    return last


def _alike(train: _Part, test: _Part, train_x: Tensor, test_x: Tensor) -> None:
    """UserError unless the samples of both parts have one shape, one type, and for images one
    range."""
    if train_x.shape[1:] != test_x.shape[1:] or train_x.dtype != test_x.dtype:
        kinds = [f"{x.dtype} {list(x.shape[1:])}".removeprefix("torch.") for x in (train_x, test_x)]
        raise UserError(
            f"{test.where('x')} holds samples of {kinds[1]}, those of {train.short} are {kinds[0]}"
        )
    if train_x.ndim != 4 or train_x.dtype is not torch.float32:
        return
    tops = train_x.max().item(), test_x.max().item()
    if min(train_x.min(), test_x.min()) >= 0 and min(tops) <= 1 and max(tops) > BYTES:
        raise UserError(
            f"{test.where('x')} goes up to {tops[1]:g}, that of {train.short} to {tops[0]:g}; "
            "allowed: one scale"
        )


def _labels(parts: Sequence[_Part]) -> user_data.Labels:
    """The classes of y, and their labels."""
    found = _whole_or_text(parts, "y")
    names, where = parts[0].arrays.get("classes"), parts[0].where("classes")
    order = None
    if names is not None:
        if names.dtype.kind != "U" or names.ndim != 1 or not len(names):
            raise UserError(
                f"{where} is {_kind(names)}; allowed: text [C], a name for each class of y"
            )
        if found[0].dtype.kind != "U":
            lowest, count = min(int(y.min()) for y in found), 1 + max(int(y.max()) for y in found)
            if lowest < 0 or count > len(names):
                raise UserError(
                    f"{where} is {_kind(names)}; allowed: text [{count}], a name for each class "
                    "of y, whole numbers from 0 up"
                )
            found = [names[y] for y in found]
        order = names.tolist()
    texts = [y.astype(str).tolist() for y in found]
    for part, labels in zip(parts, texts, strict=True):
        empty = [i for i, label in enumerate(labels) if not label.strip()]
        if empty:
            raise UserError(f"{part.where('y')}[{empty[0]}] is empty; every sample needs a label")
    return user_data.classified(texts, [p.where("y") for p in parts], lambda i: f"y[{i}]", order)


def _owners(parts: Sequence[_Part]) -> list[list[Any]] | None:
    """client of each part."""
    there = [part for part in parts if "client" in part.arrays]
    if not there:
        return None
    for part in parts:
        if "client" not in part.arrays:
            raise UserError(
                f"{part.where('client')} is missing, but {there[0].where('client')} is there; "
                "allowed: both or none"
            )
    return [client.tolist() for client in _whole_or_text(parts, "client")]


def _whole_or_text(parts: Sequence[_Part], key: str) -> list[Array]:
    """An array [n] of each part, whole numbers or text. UserError for other kinds, and for two."""
    found = [part.arrays[key] for part in parts]
    for part, array in zip(parts, found, strict=True):
        n = len(part.arrays["x"])
        if array.dtype.kind not in "iuU" or array.shape != (n,):
            raise UserError(
                f"{part.where(key)} is {_kind(array)}; allowed: whole numbers or text [{n}], one "
                "for each of x"
            )
    if len({array.dtype.kind == "U" for array in found}) == 2:
        raise UserError(
            f"{parts[1].where(key)} is {_kind(found[1])}, that of {parts[0].short} is "
            f"{_kind(found[0])}"
        )
    return found
