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
from fedml_noniid.plugins.data.types import Ints

Array = NDArray[Any]
Arrays = Mapping[str, Array]

LAYOUT = (
    "train.npz and test.npz, each with x, y and, if samples have owners, client "
    "(np.savez(file, x=..., y=...))"
)
CHANNELS = (1, 3, 4)  # of grey images, of RGB, and of RGB with a fourth channel
BYTES = 16  # images of floats that go further have the scale of bytes, not that of 0 to 1


class _Part(NamedTuple):
    """The arrays of one part, and the words for them in messages."""

    file: str  # `train.npz: `; empty for arrays in memory
    names: Mapping[str, str]  # key in a file -> name in a message
    held: Arrays

    def where(self, key: str) -> str:
        return f"{self.file}{self.names.get(key, key)}"


def arrays(
    root: Path, *, layout: Literal["auto", "CHW", "HWC"] = "auto", test_share: float | None = None
) -> Raw:
    """<root>/train.npz and <root>/test.npz, as np.savez writes them, never pickled objects.

    x: samples [n, features], grey images [n, h, w] or images with channels; uint8 (0 to 255), or
    floats of 16, 32 or 64 bits, which become float32 and have the unit 1. y: labels [n], each with
    a training sample: whole numbers 0 to C - 1, or text, numbered in sorted order. client (in both
    files or in none): owners [n], whole numbers or text, numbered in sorted order over both files.
    classes (in train.npz only, or not): the names of the classes, text [C]; for labels of text,
    their order.

    `layout` of four axes: CHW is [n, channels, h, w], HWC is [n, h, w, channels]. `auto` takes the
    axis of 1, 3 or 4 for the channels, and refuses shapes that may be both. Without test.npz, the
    share `test_share` (0.2) of the training samples is the test set, see `user_data.cut`. Raises
    UserError for anything else.
    """
    files = root / "train.npz", root / "test.npz"
    train = _Part(f"{files[0]}: ", {}, _read(files[0], ("x", "y", "client", "classes")))
    test = (
        _Part(f"{files[1]}: ", {}, _read(files[1], ("x", "y", "client")))
        if files[1].exists()
        else None
    )
    return _raw(train, test, layout, test_share)


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
    test_share: float | None = None,
) -> Raw:
    """As `arrays`, of arrays in memory; `owner` and `test_owner` are `client`.

    UserError as there.
    """
    names = {"x": "train_x", "y": "train_y", "client": "owner"}
    given = {
        "x": train_x,
        "y": train_y,
        "client": owner,
        "classes": None if classes is None else np.array(classes),
    }
    train, test = _Part("", names, _held(given, names)), None
    given = {"x": test_x, "y": test_y, "client": test_owner}
    names = {"x": "test_x", "y": "test_y", "client": "test_owner"}
    held = _held(given, names)
    if held:
        for key in ("x", "y"):
            if key not in held:
                raise UserError(
                    f"{names[key]} is missing; allowed: test_x and test_y, or none of the test set"
                )
        test = _Part("", names, held)
    known("layout", layout, ("auto", "CHW", "HWC"))
    return _raw(train, test, layout, test_share)


def _held(given: Mapping[str, object], names: Mapping[str, str]) -> Arrays:
    """Those of the arrays that aren't None. UserError for what isn't an array."""
    found = {}
    for key, value in given.items():
        if value is None:
            continue
        if not isinstance(value, np.ndarray):
            raise UserError(
                f"{names.get(key, key)} is a {type(value).__name__}; allowed: a NumPy array"
            )
        found[key] = _text_of_objects(value)
    return found


def _text_of_objects(array: Array) -> Array:
    """Text in an array of Python objects, as pandas gives it, as NumPy's own text."""
    return (
        array.astype(str)
        if array.dtype == object and all(isinstance(v, str) for v in array.flat)
        else array
    )


def _raw(train: _Part, test: _Part | None, layout: str, test_share: object) -> Raw:
    fraction = user_data.fraction_for_test(test_share, None if test is None else test.where("x"))
    parts = [train] if test is None else [train, test]
    read = [_samples(part, layout) for part in parts]
    xs, notes = [x for x, _ in read], [*dict.fromkeys(note for _, said in read for note in said)]
    if test is not None:
        _alike(train, test, xs[0], xs[1])
    ys = [_labels(part) for part in parts]
    names, train_y, test_y, said = _classes(parts, ys)
    notes += said
    owners = _owners(parts)
    if test is None:
        where = train.where("x")
        index, chosen, said = user_data.cut(
            train_y, None if owners is None else owners[0].numpy(), fraction, where
        )
        notes += said
        xs, train_y, test_y = [xs[0][index], xs[0][chosen]], train_y[index], train_y[chosen]
        owners = None if owners is None else (owners[0][index], owners[0][chosen])
    notes += user_data.untested(names, test_y)
    if owners is not None:
        notes += user_data.owners_apart(*(part.numpy() for part in owners))
    notes += user_data.repeated(xs[0], xs[1])
    unit = 255.0 if xs[0].dtype is torch.uint8 else 1.0
    y = torch.from_numpy(train_y), torch.from_numpy(test_y)
    train_owner, test_owner = owners or (None, None)
    return Raw(xs[0], y[0], xs[1], y[1], names, unit, train_owner, test_owner, notes=notes)


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
        # on damaged files, the many parsers of NumPy and zipfile raise errors of many types
        except Exception as error:
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


def _check(part: _Part, key: str, kinds: str, n: int, allowed: str) -> Array:
    """An array of a part. UserError unless it is [n], and its type is one of NumPy's `kinds`."""
    array = part.held[key]
    if array.dtype.kind not in kinds or array.shape != (n,):
        raise UserError(f"{part.where(key)} is {_kind(array)}; allowed: {allowed}")
    return array


def _samples(part: _Part, layout: str) -> tuple[Tensor, list[str]]:
    """x as [n, features] or [n, channels, h, w], uint8 or float32, and notes."""
    x, where = part.held["x"], part.where("x")
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
        last, said = _channels_last(where, x, layout)
        x, notes = np.moveaxis(x, 3, 1) if last else x, [said] if said else []
    elif layout != "auto":
        raise refusal(
            "layout",
            layout,
            f"auto, since {where} has {x.ndim} axes; images with channels have four",
        )
    if x.ndim >= 3 and x.dtype == np.float32 and x.max() > 1:
        notes.append(
            f"images of floats from {x.min():g} to {x.max():g}: the scale of `noise` and of "
            "normalise half, none and "
            "[mean, deviation] takes 1 for white; write bytes (uint8) or values from 0 to 1 to "
            "use these"
        )
    return torch.from_numpy(np.array(x[:, None] if x.ndim == 3 else x, order="C")), notes


def _channels_last(where: str, x: Array, layout: str) -> tuple[bool, str]:
    """(whether x is [n, h, w, channels], a note on that)."""
    if layout != "auto":
        return layout == "HWC", ""
    first, last = x.shape[1] in CHANNELS, x.shape[3] in CHANNELS
    if first and not last:
        return False, ""
    if last and not first:
        return (
            True,
            (
                f"images read as [h, w, channels]: each was {list(x.shape[1:])}, now channels are "
                "first"
            ),
        )
    raise UserError(
        f"{where} is {_kind(x)}: the channels may be axis 1 or axis 3; needed: layout: CHW for "
        "[n, channels, h, w], "
        "or HWC for [n, h, w, channels]"
    )


def _alike(train: _Part, test: _Part, train_x: Tensor, test_x: Tensor) -> None:
    """UserError unless the samples of both parts have one shape, one type, and for images one
    range."""
    if train_x.shape[1:] != test_x.shape[1:] or train_x.dtype != test_x.dtype:
        kinds = [f"{x.dtype} {list(x.shape[1:])}".removeprefix("torch.") for x in (train_x, test_x)]
        raise UserError(
            f"{test.where('x')} holds samples of {kinds[1]}, those of {_other(train)} are "
            f"{kinds[0]}"
        )
    if (
        train_x.ndim == 4
        and min(train_x.min(), test_x.min()) >= 0
        and train_x.dtype is torch.float32
    ):
        tops = train_x.max().item(), test_x.max().item()
        if min(tops) <= 1 and max(tops) > BYTES:
            raise UserError(
                f"{test.where('x')} goes up to {tops[1]:g}, that of {_other(train)} to "
                f"{tops[0]:g}; allowed: one scale"
            )


def _other(part: _Part) -> str:
    """The part in a message on the other one."""
    return Path(part.file.removesuffix(": ")).name if part.file else part.names["x"]


def _labels(part: _Part) -> Array:
    """y: whole numbers, int64, or text."""
    n = len(part.held["x"])
    y = _check(part, "y", "iuU", n, f"whole numbers or text [{n}], one for each of x")
    if y.dtype.kind == "U":
        if not all(map(str.strip, y.tolist())):
            empty = next(i for i, label in enumerate(y.tolist()) if not label.strip())
            raise UserError(f"{part.where('y')}[{empty}] is empty; every sample needs a label")
        return y
    if y.min() < 0 or y.max() >= 2**31:
        place = int(np.argmax((y < 0) | (y >= 2**31)))
        raise refusal(f"{part.where('y')}[{place}]", y[place].item(), "whole numbers from 0 up")
    return y.astype(np.int64)


def _classes(
    parts: Sequence[_Part], ys: Sequence[Array]
) -> tuple[list[str], Ints, Ints, list[str]]:
    """(names of the classes, labels of the training set and of the given test set, notes)."""
    names = parts[0].held.get("classes")
    if names is not None and (names.dtype.kind != "U" or names.ndim != 1 or not len(names)):
        raise UserError(
            f"{parts[0].where('classes')} is {_kind(names)}; allowed: text [C], a name for each "
            "class of y"
        )
    kinds = {y.dtype.kind == "U" for y in ys}
    where = parts[0].where("y"), parts[-1].where("y")
    if len(kinds) == 2:
        raise UserError(
            f"{where[1]} is {_kind(ys[1])}, that of {_other(parts[0])} is {_kind(ys[0])}"
        )
    if kinds == {True}:
        order = None if names is None else names.tolist()
        test = ys[1].tolist() if len(ys) > 1 else []
        return user_data.classes(ys[0].tolist(), test, where, lambda i: f"y[{i}]", order)
    test_y = ys[1] if len(ys) > 1 else np.zeros(0, dtype=np.int64)
    return _names(parts, ys[0], test_y, names), ys[0], test_y, []


def _names(parts: Sequence[_Part], train: Ints, test: Ints, names: Array | None) -> list[str]:
    """The names of classes that are numbers. UserError unless each class has a training sample."""
    where, top = parts[0].where("y"), int(train.max())
    if test.max(initial=0) > top:
        key = f"{parts[-1].where('y')}[{test.argmax()}]"
        raise refusal(key, int(test.max()), f"0 to {top}, as in {_other(parts[0])}")
    count, present = top + 1, np.unique(train)
    # Up to here lie the five lowest missing classes, if so many are missing.
    missing = np.setdiff1d(np.arange(min(count, len(present) + 5)), present)[:5]
    if len(missing):
        said = ", ".join(map(str, missing))
        raise UserError(
            f"{where} goes up to {top}, but no sample has {said}; every class needs some"
        )
    if count < 2:
        raise UserError(f"{where} is always 0; at least 2 classes are needed")
    if names is None:
        return [str(label) for label in range(count)]
    if names.shape != (count,) or len(np.unique(names)) != count:
        raise UserError(
            f"{parts[0].where('classes')} is {_kind(names)}; allowed: text [{count}], a name "
            "for each class of y"
        )
    return [str(name) for name in names]


def _owners(parts: Sequence[_Part]) -> tuple[Tensor, Tensor] | None:
    """client of both parts as numbers from 0; the second is empty if there is one part."""
    lacking = [part for part in parts if "client" not in part.held]
    if len(lacking) == len(parts):
        return None
    if lacking:
        (other,) = (part for part in parts if "client" in part.held)
        names = other.where("client"), lacking[0].where("client")
        if not other.file:
            raise UserError(
                f"{names[1]} is missing, but {names[0]} is there; allowed: both or none"
            )
        holds = f"{lacking[0].file}holds no array 'client', but {_other(other)} does"
        raise UserError(f"{holds}; allowed: in both or in none")
    found = []
    for part in parts:
        n = len(part.held["x"])
        found.append(_check(part, "client", "iuU", n, f"whole numbers or text [{n}]"))
    if len({client.dtype.kind == "U" for client in found}) == 2:
        kinds = [_kind(client) for client in found]
        raise UserError(
            f"{parts[1].where('client')} is {kinds[1]}, in {_other(parts[0])} it is {kinds[0]}"
        )
    # As Python's own values: NumPy has no type for both int64 and uint64.
    both = np.concatenate([client.astype(object) for client in found])
    owner = torch.from_numpy(np.unique(both, return_inverse=True)[1])
    return owner[: len(found[0])], owner[len(found[0]) :]
