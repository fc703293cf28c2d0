"""A user's own samples, as NumPy arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedml_noniid.core.errors import MISSING, UserError, located
from fedml_noniid.core.options import check_options
from fedml_noniid.data.checks import known
from fedml_noniid.data.dataset import Raw
from fedml_noniid.data.inputs import Input, described, is_bytes, joined, to_array
from fedml_noniid.data.precision import narrowed
from fedml_noniid.data.readers import user_data

Array = NDArray[Any]
Arrays = Mapping[str, Array]

LAYOUT = (
    "train.npz and test.npz, each with x, y and, if samples have owners, client "
    "(np.savez(file, x=..., y=...))"
)
# Names of `fedml_noniid.from_arrays` -> names in the files.
TRAIN = {"x": "x", "y": "y", "owner": "client", "classes": "classes"}
TEST = {"test_x": "x", "test_y": "y", "test_owner": "client"}
INPUT = "x."  # begins the names of several inputs in the files: x.image, x.age
NAMES = ("x", "y", "test_x", "test_y", "owner", "test_owner", "classes")
CHANNELS = (1, 3, 4)  # of grey images, of RGB, and of RGB with a fourth channel
BYTES = 16  # images of floats that go further have the scale of bytes, not that of 0 to 1


class _Part(NamedTuple):
    """The arrays of the training set or of the test set."""

    arrays: Arrays
    prefix: str  # of an array's name in a message
    client: str = "client"  # the name of the owners in a message

    def array_name(self, key: str) -> str:
        return self.prefix + (self.client if key == "client" else key)

    @property
    def inputs(self) -> dict[str, Array]:
        """Several inputs by name; empty if there is one x."""
        items = self.arrays.items()
        return {key.removeprefix(INPUT): x for key, x in items if key.startswith(INPUT)}

    @property
    def n(self) -> int:
        """Samples."""
        return len(next(iter(self.inputs.values()), self.arrays.get("x", ())))


def arrays(
    root: Path,
    *,
    layout: Literal["auto", "CHW", "HWC"] = "auto",
    test_share: user_data.Share | None = None,
) -> Raw:
    """<root>/train.npz and <root>/test.npz, as np.savez writes them, never pickled objects.

    x: samples [n, features], grey images [n, h, w] or images with channels; uint8 (0 to 255), or
    floats of 16, 32 or 64 bits, which have the unit 1. In place of x, several
    inputs of a network of your own, each [n, ...]: x.image, x.age (`data.inputs`). y:
    labels [n], whole numbers or text, numbered in sorted order; each test label has a training
    sample. Or targets for a loss that is no cross-entropy: numbers, floats [n] or [n, t]; several
    labels, 0 and 1 of any kind [n, C]. client (in both files or in none): owners [n], whole numbers
    or text, numbered in sorted order over both files. classes (in train.npz only, or not): text
    [C], the names of the labels 0 to C - 1, or of the targets; for labels of text, their order.

    `layout` of four axes: CHW is [n, channels, h, w], HWC is [n, h, w, channels]. `auto` takes the
    axis of 1, 3 or 4 for the channels, and refuses shapes that may be both. Without test.npz, the
    share `test_share` (0.2) of the training samples is the test set, see `user_data.cut`. Raises
    UserError for anything else.
    """
    return replace(
        _of_files(root, layout, test_share),
        without=partial(_of_files, root, layout, test_share),
    )


def _of_files(root: Path, layout: str, test_share: float | None, unseen: Sequence[str] = ()) -> Raw:
    """The data set of `arrays`, without the owners `unseen`."""
    parts = [_read(root / "train.npz", ("x", "y", "client", "classes"))]
    if (root / "test.npz").exists():
        parts.append(_read(root / "test.npz", ("x", "y", "client")))
    return _raw(parts, layout, test_share, unseen)


def of_named(values: Mapping[str, Any], unseen: Sequence[str] = ()) -> Raw:
    """As `arrays`, of values by the names of `fedml_noniid.from_arrays`, which messages have too;
    without the owners `unseen`, whose samples it has apart.

    Text may be Python objects, as in pandas. UserError, also for another name, and without x and y.
    """
    how = {key: value for key, value in values.items() if key not in NAMES}
    check_options(arrays, how, NAMES)
    for key in NAMES[:2]:
        if values.get(key) is None:
            raise UserError(MISSING, path=(key,))
    parts = []
    for prefix, names in (("", TRAIN), ("test_", TEST)):
        if by_name := _by_file(values, names):
            parts.append(_complete(_Part(by_name, prefix, "owner")))
    raw = _raw(parts, how.get("layout", "auto"), how.get("test_share"), unseen)
    return replace(raw, without=partial(of_named, values) if raw.owner_names else None)


def _by_file(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Array]:
    """The arrays of one part by their names in files; of a dict of inputs, `x.name` each."""
    by_name: dict[str, Array] = {}
    for key, name in names.items():
        value = values.get(key)
        if name == "x" and isinstance(value, Mapping):
            by_name |= inputs_of(key, value)
        elif value is not None:
            array = to_array(key, value)
            is_text = array.dtype == object and all(isinstance(text, str) for text in array.flat)
            by_name[name] = array.astype(str) if is_text else array
    return by_name


def inputs_of(key: str, inputs: Mapping[Any, Any]) -> dict[str, Array]:
    """Several inputs by their names in files. UserError for names that can't be arguments."""
    for name in inputs:
        if not (isinstance(name, str) and name.isidentifier()):
            raise UserError(path=(key,), value=name, allowed="names of letters, digits and '_'")
    if not inputs:
        raise UserError(f"{key} has no input")
    return {f"{INPUT}{name}": to_array(f"{key}.{name}", inputs[name]) for name in inputs}


def _encoded(ends: Tensor, layout: str, x: Any) -> Tensor:
    """New samples. UserError unless they are as those of training; `ends`: the least and the
    greatest values of these, [2, ...]."""
    encoded, _ = _samples(_Part({"x": to_array("x", x)}, ""), layout)
    encoded = _as_floats(encoded, ends)
    _alike("train_x", ends, "x", encoded)
    return encoded


def _encoded_inputs(inputs: Mapping[str, Input], scaled: Collection[str], x: Any) -> Tensor | None:
    """New samples of several inputs; None if they are not named. UserError as `joined`."""
    if not isinstance(x, Mapping):
        return None
    arrays = {name: to_array(f"x.{name}", array) for name, array in x.items()}
    return torch.from_numpy(joined(inputs, scaled, arrays, INPUT))


def _raw(
    parts: Sequence[_Part], layout: str, test_share: float | None, unseen: Sequence[str] = ()
) -> Raw:
    if unseen:
        parts, x, label, owner = _without_owners(parts, unseen)
        raw = _raw(parts, layout, test_share)
        assert raw.encode is not None, "arrays are encoded"
        with located("unseen"):
            unseen_x = raw.encode(x)
        assert unseen_x is not None, "they are as those of training"
        return user_data.with_unseen(raw, unseen_x, label, owner, unseen)
    names = [part.array_name("x") for part in parts]
    inputs = described(parts[0].inputs)
    for part in parts:
        if bool(part.inputs) != bool(inputs) or (inputs and "x" in part.arrays):
            raise UserError(
                f"{part.array_name('x')}: one x, or several inputs, in both parts alike"
            )
    scaled = frozenset(name for name, x in parts[0].inputs.items() if is_bytes(x))
    read = [
        (torch.from_numpy(joined(inputs, scaled, part.inputs, f"{part.prefix}{INPUT}")), [])
        if inputs
        else _samples(part, layout)
        for part in parts
    ]
    xs = _as_training([x for x, _ in read])
    _alike(names[0], xs[0], names[-1], xs[-1])
    rows = user_data.rows_of(*_labels(parts), _owners(parts), test_share, names)
    unit = 255.0 if xs[0].dtype is torch.uint8 else 1.0
    raw = rows.raw(xs, unit, list(dict.fromkeys(note for _, notes in read for note in notes)))
    ends = torch.stack([xs[0].amin(0), xs[0].amax(0)])
    new = partial(_encoded_inputs, inputs, scaled) if inputs else partial(_encoded, ends, layout)
    return replace(raw, inputs=inputs, encode=new)


def _without_owners(
    parts: Sequence[_Part], names: Sequence[str]
) -> tuple[list[_Part], Any, user_data.Labels, user_data.Labels]:
    """(the parts without the samples of some owners; of these samples x, or the inputs by name,
    the labels and the owners). UserError if a part is then empty."""
    if _owners(parts) is None:
        raise UserError("the samples have no owners")
    classes, numbers = _labels(parts)
    labels = [np.array(classes)[y] for y in numbers]
    owners = [user_data.Labels.from_texts(part.arrays["client"]) for part in parts]
    is_apart = [part.among(names) >= 0 for part in owners]
    others = []
    for part, y, rows in zip(parts, labels, is_apart, strict=True):
        if rows.all():
            raise UserError(f"{part.array_name('client')}: all are of owners that take no part")
        arrays = {key: array[~rows] for key, array in part.arrays.items() if key != "classes"}
        arrays["y"] = y[~rows]
        if "classes" in part.arrays:  # the order of those that are left
            arrays["classes"] = np.array([name for name in classes if name in arrays["y"]])
        others.append(part._replace(arrays=arrays))

    def apart(arrays: Sequence[Array]) -> Array:
        return np.concatenate([array[rows] for array, rows in zip(arrays, is_apart, strict=True)])

    inputs = {name: apart([part.inputs[name] for part in parts]) for name in parts[0].inputs}
    x = inputs or apart([part.arrays["x"] for part in parts])
    client = apart([np.array(part.texts)[part.number] for part in owners])
    of_labels = user_data.Labels.from_texts
    return others, x, of_labels(apart(labels)), of_labels(client)


def _as_training(xs: Sequence[Tensor]) -> list[Tensor]:
    """Samples of floats in the type that those of training need."""
    first = torch.from_numpy(narrowed(xs[0].numpy())) if xs[0].is_floating_point() else xs[0]
    return [first, *(_as_floats(x, first) for x in xs[1:])]


def _as_floats(x: Tensor, like: Tensor) -> Tensor:
    """Floats as the floats of training; all others as they are."""
    return x.to(like.dtype) if x.is_floating_point() and like.is_floating_point() else x


def _read(file: Path, allowed: Sequence[str]) -> _Part:
    """The arrays of one file."""
    if not file.exists():
        raise UserError(f"{file}: there is no such file; needed: {LAYOUT}")
    with file.open("rb") as stream:
        try:
            # No objects, since they are pickled: unpickling a file can run any program.
            with np.load(stream, allow_pickle=False) as opened:
                by_name = {key: np.asarray(opened[key]) for key in opened.files}
        except Exception:  # of any kind: parsers of NumPy and zipfile, on damaged files
            raise UserError(
                f"{file}: can't be read as arrays (damaged, too large, with Python objects, or "
                f"another kind of file); needed: {LAYOUT}"
            ) from None
    for key in by_name:
        if not key.startswith(INPUT):
            known(f"{file}: array", key, allowed)
    return _complete(_Part(by_name, f"{file}: "))


def _complete(part: _Part) -> _Part:
    for key in ("x", "y"):
        if key not in part.arrays and not (key == "x" and part.inputs):
            raise UserError(f"{part.array_name(key)} is missing; needed: x and y of each part")
    return part


def _kind(array: Array) -> str:
    return f"{array.dtype} {list(array.shape)}"


def _samples(part: _Part, layout: str) -> tuple[Tensor, list[str]]:
    """x as [n, features] or [n, channels, h, w], uint8, float32 or float64, and notes."""
    x, name = part.arrays["x"], part.array_name("x")
    if x.dtype != np.uint8 and (x.dtype.kind != "f" or x.dtype.itemsize > 8):
        raise UserError(
            f"{name} is {_kind(x)}; allowed: uint8 (0 to 255), float16, float32, float64"
        )
    if x.ndim not in (2, 3, 4) or x.size == 0:
        raise UserError(
            f"{name} is {_kind(x)}; allowed: [n, features], [n, h, w], [n, channels, h, w] or "
            "[n, h, w, channels], "
            "none of them 0"
        )
    if x.dtype != np.uint8:
        with np.errstate(over="ignore"):  # too large for float32: becomes infinite, and is refused
            x = x.astype(np.promote_types(x.dtype, np.float32), copy=False)
            finite = np.isfinite(x.astype(np.float32, copy=False))
        if not finite.all():
            position = np.unravel_index(int(finite.argmin()), x.shape)
            at = ", ".join(map(str, position))
            wrong = f"{name}[{at}] = {x[position]} is refused"
            raise UserError(f"{wrong}; allowed: finite numbers of float32")
    notes = []
    if x.ndim == 4 and _channels_last(name, x, layout):
        if layout == "auto":
            notes.append(
                f"images read as [h, w, channels]: each was {list(x.shape[1:])}, now channels are "
                "first"
            )
        x = np.moveaxis(x, 3, 1)
    if x.ndim >= 3 and x.dtype != np.uint8 and x.max() > 1:
        notes.append(
            f"images of floats from {x.min():g} to {x.max():g}: the scale of `noise` and of "
            "normalise half, none and [mean, deviation] takes 1 for white; write bytes (uint8) or "
            "values from 0 to 1 to use these"
        )
    return torch.from_numpy(np.array(x[:, None] if x.ndim == 3 else x, order="C")), notes


def _channels_last(name: str, x: Array, layout: str) -> bool:
    """Whether x is [n, h, w, channels]. UserError if it may be that or not."""
    if layout != "auto":
        return layout == "HWC"
    first, last = x.shape[1] in CHANNELS, x.shape[3] in CHANNELS
    if first == last:
        raise UserError(
            f"{name} is {_kind(x)}: the channels may be axis 1 or axis 3; needed: layout: CHW for "
            "[n, channels, h, w], or HWC for [n, h, w, channels]"
        )
    return last


def _alike(train: str, train_x: Tensor, test: str, test_x: Tensor) -> None:
    """UserError unless both have samples of one shape, one type, and for images one range."""
    if train_x.shape[1:] != test_x.shape[1:] or train_x.dtype != test_x.dtype:
        kinds = [f"{x.dtype} {list(x.shape[1:])}".removeprefix("torch.") for x in (train_x, test_x)]
        raise UserError(f"{test} holds samples of {kinds[1]}, {train} holds {kinds[0]}")
    if train_x.ndim != 4 or not train_x.is_floating_point():
        return
    tops = train_x.max().item(), test_x.max().item()
    if min(train_x.min(), test_x.min()) >= 0 and min(tops) <= 1 and max(tops) > BYTES:
        raise UserError(
            f"{test} goes up to {tops[1]:g}, {train} to {tops[0]:g}; allowed: one scale"
        )


def _targets(parts: Sequence[_Part]) -> tuple[list[str], list[Array]]:
    """The names of the targets, and the targets [n, t]."""
    ys = [part.arrays["y"] for part in parts]
    for part, y in zip(parts, ys, strict=True):
        if y.dtype.kind not in "fiub" or y.ndim not in (1, 2) or 0 in y.shape or (len(y) != part.n):
            raise UserError(
                f"{part.array_name('y')} is {_kind(y)}; allowed: numbers [{part.n}, t], "
                "a row for each of x"
            )
    columns = [y.reshape(len(y), -1) for y in ys]
    width = columns[0].shape[1]
    if columns[-1].shape[1] != width:
        raise UserError(
            f"{parts[-1].array_name('y')} is {_kind(ys[-1])}, "
            f"{parts[0].array_name('y')} is {_kind(ys[0])}; allowed: as many targets"
        )
    named = parts[0].arrays.get("classes")
    names = [f"y{t}" if width > 1 else "y" for t in range(width)]
    if named is not None:
        if named.dtype.kind != "U" or named.shape != (width,):
            name = parts[0].array_name("classes")
            raise UserError(f"{name} is {_kind(named)}; allowed: text [{width}], their names")
        names = named.tolist()
    return user_data.targets(
        columns, names, [p.array_name("y") for p in parts], lambda i: f"row {i}"
    )


def _is_target(y: Array) -> bool:
    """Whether y holds numbers or several labels, not classes."""
    labels = y.dtype.kind in "iub" and y.ndim == 2 and y.shape[1] > 1
    return y.dtype.kind == "f" or (labels and bool(np.isin(y, (0, 1)).all()))


def _labels(parts: Sequence[_Part]) -> tuple[list[str], list[Array]]:
    """The classes of y, and their labels; or the names of the targets, and the targets."""
    if any(_is_target(part.arrays["y"]) for part in parts):
        return _targets(parts)
    values = _whole_or_text(parts, "y")
    names, name = parts[0].arrays.get("classes"), parts[0].array_name("classes")
    order = None
    if names is not None:
        if names.dtype.kind != "U" or names.ndim != 1 or not len(names):
            raise UserError(
                f"{name} is {_kind(names)}; allowed: text [C], a name for each class of y"
            )
        if values[0].dtype.kind != "U":
            lowest, count = min(int(y.min()) for y in values), 1 + max(int(y.max()) for y in values)
            if lowest < 0 or count > len(names):
                raise UserError(
                    f"{name} is {_kind(names)}; allowed: text [{count}], a name for each class "
                    "of y, whole numbers from 0 up"
                )
            values = [names[y] for y in values]
        order = names.tolist()
    labels = [user_data.Labels.from_texts(y) for y in values]
    for part, part_labels in zip(parts, labels, strict=True):
        empty = part_labels.first(lambda text: not text.strip())
        if empty is not None:
            raise UserError(f"{part.array_name('y')}[{empty}] is empty; every sample needs a label")
    return user_data.classified(
        labels, [p.array_name("y") for p in parts], lambda i: f"y[{i}]", order
    )


def _owners(parts: Sequence[_Part]) -> list[Any] | None:
    """client of each part."""
    missing = [part.array_name("client") for part in parts if "client" not in part.arrays]
    if len(missing) == len(parts):
        return None
    if missing:
        raise UserError(f"{missing[0]} is missing; allowed: owners of both parts or of none")
    owners = _whole_or_text(parts, "client")
    for part, client in zip(parts, owners, strict=True):
        if client.dtype.kind == "U" and (blank := np.char.strip(client) == "").any():
            at = f"{part.array_name('client')}[{blank.argmax()}]"
            raise UserError(f"{at} is empty; every sample needs an owner")
    return [
        owner if owner.dtype.kind in "iu" else user_data.Labels.from_texts(owner)
        for owner in owners
    ]


def _whole_or_text(parts: Sequence[_Part], key: str) -> list[Array]:
    """An array [n] of each part, whole numbers or text. UserError for other kinds, and for two."""
    columns = [part.arrays[key] for part in parts]
    for part, array in zip(parts, columns, strict=True):
        n = part.n
        if array.dtype.kind not in "iuU" or array.shape != (n,):
            raise UserError(
                f"{part.array_name(key)} is {_kind(array)}; allowed: whole numbers or text [{n}], "
                "one for each of x"
            )
    if len({array.dtype.kind == "U" for array in columns}) == 2:
        kinds = [f"{part.array_name(key)} is {_kind(part.arrays[key])}" for part in parts]
        raise UserError(f"{' and '.join(kinds)}; allowed: one kind")
    return columns
