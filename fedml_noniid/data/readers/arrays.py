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

from fedml_noniid.core.errors import MISSING, UserError
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
NOUNS = {"y": "a label", "client": "an owner"}
INPUT = "x."  # begins the names of several inputs in the files: x.image, x.age
NAMES = ("x", "y", "test_x", "test_y", "owner", "test_owner", "classes")
SHAPES = "[n, features], [n, h, w], [n, channels, h, w] or [n, h, w, channels], none of them 0"
CHANNELS = (1, 3, 4)  # of grey images, of RGB, and of RGB with a fourth channel
BYTES = 16  # images of floats that go further have the scale of bytes, not that of 0 to 1


class _Part(NamedTuple):
    """The arrays of the training set or of the test set."""

    arrays: Arrays
    prefix: str  # of an array's name in a message
    client: str = "client"  # the name of the owners in a message

    def array_name(self, key: str) -> str:
        return self.prefix + (self.client if key == "client" else key)

    def refused(self, key: str, allowed: str) -> UserError:
        """The error for an array of another kind, to be raised by the caller."""
        kind = _kind(self.arrays[key])
        return UserError(f"{self.array_name(key)} is {kind}", allowed=allowed)

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


def _encoded(ends: Array, layout: str, x: Any) -> Tensor:
    """New samples. UserError unless they are as those of training; `ends`: the least and the
    greatest values of these, [2, ...]."""
    (encoded,), _ = _samples([_Part({"x": to_array("x", x)}, "")], layout)
    encoded = _as_floats(encoded, ends)
    _alike("train_x", ends, "x", encoded)
    return torch.from_numpy(encoded)


def _encoded_inputs(inputs: Mapping[str, Input], scaled: Collection[str], x: Any) -> Tensor | None:
    """New samples of several inputs; None if they are not named. UserError as `joined`."""
    if not isinstance(x, Mapping):
        return None
    arrays = {name: to_array(f"x.{name}", array) for name, array in x.items()}
    return torch.from_numpy(joined(inputs, scaled, arrays, INPUT))


def _raw(
    parts: Sequence[_Part], layout: str, test_share: float | None, unseen: Sequence[str] = ()
) -> Raw:
    inputs, names = described(parts[0].inputs), [part.array_name("x") for part in parts]
    scaled = frozenset(name for name, x in parts[0].inputs.items() if is_bytes(x))
    xs, notes = _inputs(parts, inputs, scaled) if inputs else _samples(parts, layout)
    cells: dict[str, list[Any]] = {"x": xs}
    has_classes, order = not any(map(_is_target, parts)), None
    if has_classes:
        cells["y"], order = _labels(parts)
    else:
        classes, y = _targets(parts)
    if (owners := _owners(parts)) is not None:
        cells["client"] = owners
    apart: dict[str, Any] = {}
    if unseen:
        sources = [part.array_name("client") for part in parts]
        apart, cells = user_data.apart(cells, "client", unseen, sources)
        order = order and [name for name in order if any((y == name).any() for y in cells["y"])]
    if has_classes:
        sources = [part.array_name("y") for part in parts]
        classes, y = user_data.classified(cells["y"], sources, lambda i: f"y[{i}]", order)
    first = cells["x"][0]
    first = narrowed(first) if first.dtype.kind == "f" else first
    xs = [first, *(_as_floats(x, first) for x in cells["x"][1:])]
    _alike(names[0], xs[0], names[-1], xs[-1])
    rows = user_data.rows_of(classes, y, cells.get("client"), test_share, names)
    unit = 255.0 if first.dtype == np.uint8 else 1.0
    raw = rows.raw([*map(torch.from_numpy, xs)], unit, list(dict.fromkeys(notes)))
    ends = np.stack([first.min(0), first.max(0)])
    new = partial(_encoded_inputs, inputs, scaled) if inputs else partial(_encoded, ends, layout)
    raw = replace(raw, inputs=inputs, encode=new)
    if not unseen:
        return raw
    x = torch.from_numpy(apart["x"])
    return user_data.with_unseen(raw, x, apart["y"], apart["client"], unseen)


def _as_floats(x: Array, like: Array) -> Array:
    """Floats as the floats of training; all others as they are."""
    return x.astype(like.dtype, copy=False) if x.dtype.kind == like.dtype.kind == "f" else x


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


def _inputs(
    parts: Sequence[_Part], inputs: Mapping[str, Input], scaled: Collection[str]
) -> tuple[list[Array], list[str]]:
    """The samples [n, total] of several inputs; no notes."""
    for part in parts:
        if not part.inputs or "x" in part.arrays:
            name = part.array_name("x")
            raise UserError(f"{name}: one x, or several inputs, in both parts alike")
    return [joined(inputs, scaled, part.inputs, f"{part.prefix}{INPUT}") for part in parts], []


def _samples(parts: Sequence[_Part], layout: str) -> tuple[list[Array], list[str]]:
    """x of each part as [n, features] or [n, channels, h, w], uint8, float32 or float64; notes."""
    xs, notes = [], []
    for part in parts:
        x, name = part.arrays.get("x"), part.array_name("x")
        if x is None or part.inputs:
            raise UserError(f"{name}: one x, or several inputs, in both parts alike")
        if x.dtype != np.uint8 and (x.dtype.kind != "f" or x.dtype.itemsize > 8):
            raise part.refused("x", "uint8 (0 to 255), float16, float32, float64")
        if x.ndim not in (2, 3, 4) or x.size == 0:
            raise part.refused("x", SHAPES)
        if x.dtype != np.uint8:
            # What is too large for float32 becomes infinite, and is refused.
            with np.errstate(over="ignore"):
                x = x.astype(np.promote_types(x.dtype, np.float32), copy=False)
                finite = np.isfinite(x.astype(np.float32, copy=False))
            if not finite.all():
                position = np.unravel_index(int(finite.argmin()), x.shape)
                cell = f"{name}[{', '.join(map(str, position))}] = {x[position]}"
                raise UserError(f"{cell} is refused", allowed="finite numbers of float32")
        if x.ndim == 4 and _channels_last(part, layout):
            if layout == "auto":
                shape = list(x.shape[1:])
                notes.append(
                    f"images read as [h, w, channels]: each was {shape}, now channels are first"
                )
            x = np.moveaxis(x, 3, 1)
        if x.ndim >= 3 and x.dtype != np.uint8 and x.max() > 1:
            notes.append(
                f"images of floats from {x.min():g} to {x.max():g}: the scale of `noise` and of "
                "normalise half, none and [mean, deviation] takes 1 for white; write bytes (uint8) "
                "or values from 0 to 1 to use these"
            )
        xs.append(np.array(x[:, None] if x.ndim == 3 else x, order="C"))
    return xs, notes


def _channels_last(part: _Part, layout: str) -> bool:
    """Whether x is [n, h, w, channels]. UserError if it may be that or not."""
    if layout != "auto":
        return layout == "HWC"
    x = part.arrays["x"]
    is_first, is_last = (x.shape[axis] in CHANNELS for axis in (1, 3))
    if is_first == is_last:
        raise UserError(
            f"{part.array_name('x')} is {_kind(x)}: the channels may be axis 1 or axis 3; needed: "
            "layout: CHW for [n, channels, h, w], or HWC for [n, h, w, channels]"
        )
    return is_last


def _alike(train: str, train_x: Array, test: str, test_x: Array) -> None:
    """UserError unless both have samples of one shape, one type, and for images one range."""
    if train_x.shape[1:] != test_x.shape[1:] or train_x.dtype != test_x.dtype:
        kinds = [f"{x.dtype} {list(x.shape[1:])}" for x in (train_x, test_x)]
        raise UserError(f"{test} holds samples of {kinds[1]}, {train} holds {kinds[0]}")
    if train_x.ndim != 4 or train_x.dtype.kind != "f":
        return
    tops = train_x.max(), test_x.max()
    if min(train_x.min(), test_x.min()) >= 0 and min(tops) <= 1 and max(tops) > BYTES:
        raise UserError(
            f"{test} goes up to {tops[1]:g}, {train} to {tops[0]:g}; allowed: one scale"
        )


def _targets(parts: Sequence[_Part]) -> tuple[list[str], list[Array]]:
    """The names of the targets, and the targets [n, t]."""
    for part in parts:
        y = part.arrays["y"]
        if y.dtype.kind not in "fiub" or y.ndim not in (1, 2) or 0 in y.shape or len(y) != part.n:
            raise part.refused("y", f"numbers [{part.n}, t], a row for each of x")
    columns = [part.arrays["y"].reshape(part.n, -1) for part in parts]
    width = columns[0].shape[1]
    if columns[-1].shape[1] != width:
        raise parts[-1].refused("y", f"{width} targets, as {parts[0].array_name('y')} has")
    names, named = [f"y{t}" for t in range(width)], parts[0].arrays.get("classes")
    if named is not None:
        if named.dtype.kind != "U" or named.shape != (width,):
            raise parts[0].refused("classes", f"text [{width}], their names")
        names = named.tolist()
    elif width == 1:
        names = ["y"]
    sources = [part.array_name("y") for part in parts]
    return user_data.targets(columns, names, sources, lambda i: f"row {i}")


def _is_target(part: _Part) -> bool:
    """Whether y holds numbers or several labels, not classes."""
    y = part.arrays["y"]
    labels = y.dtype.kind in "iub" and y.ndim == 2 and y.shape[1] > 1
    return y.dtype.kind == "f" or (labels and bool(np.isin(y, (0, 1)).all()))


def _labels(parts: Sequence[_Part]) -> tuple[list[Any], list[str] | None]:
    """The classes that y names in each part, and their order, if it is given."""
    values, names = _whole_or_text(parts, "y"), parts[0].arrays.get("classes")
    if names is not None:
        if names.dtype.kind != "U" or names.ndim != 1 or not len(names):
            raise parts[0].refused("classes", "text [C], a name for each class of y")
        if values[0].dtype.kind != "U":
            lowest, count = min(int(y.min()) for y in values), 1 + max(int(y.max()) for y in values)
            if lowest < 0 or count > len(names):
                allowed = f"text [{count}], a name for each class of y, whole numbers from 0 up"
                raise parts[0].refused("classes", allowed)
            values = [names[y] for y in values]
    labels = [user_data.labels_of(y) for y in values]
    return labels, None if names is None else names.tolist()


def _owners(parts: Sequence[_Part]) -> list[Any] | None:
    """client of each part: whole numbers or text."""
    missing = [part.array_name("client") for part in parts if "client" not in part.arrays]
    if len(missing) == len(parts):
        return None
    if missing:
        raise UserError(f"{missing[0]} is missing; allowed: owners of both parts or of none")
    owners = _whole_or_text(parts, "client")
    return [user_data.labels_of(owner) if owner.dtype.kind == "U" else owner for owner in owners]


def _whole_or_text(parts: Sequence[_Part], key: str) -> list[Array]:
    """An array [n] of each part, whole numbers or text, of which none is empty. UserError for other
    kinds, and for two."""
    for part in parts:
        array = part.arrays[key]
        if array.dtype.kind not in "iuU" or array.shape != (part.n,):
            raise part.refused(key, f"whole numbers or text [{part.n}], one for each of x")
        if array.dtype.kind == "U" and (blank := np.char.strip(array) == "").any():
            what = f"{part.array_name(key)}[{blank.argmax()}]"
            raise UserError(f"{what} is empty; every sample needs {NOUNS[key]}")
    columns = [part.arrays[key] for part in parts]
    if len({array.dtype.kind == "U" for array in columns}) == 2:
        kinds = [f"{part.array_name(key)} is {_kind(part.arrays[key])}" for part in parts]
        raise UserError(f"{' and '.join(kinds)}; allowed: one kind")
    return columns
