"""Reads data sets of items, such as torch's and those of Hugging Face (`datasets`).

Nothing of either is imported: what counts is `len()`, items by number, and `features` with the
names of classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedml_noniid.core.errors import UserError, among, located
from fedml_noniid.core.options import check_options
from fedml_noniid.data.inputs import Array, is_bytes, to_array
from fedml_noniid.own_code import call

NUMBERS, TEXT = "biuf", "U"  # kinds of NumPy
Path = tuple[int | str, ...]  # from an item to a value in it
ALLOWED = (
    "a data set with len() and items by number, such as torch.utils.data.Dataset; of a dict of data"
    " sets, one of them"
)


def arrays_of(
    dataset: Any,
    test: Any = None,
    *,
    label: str | None = None,
    owner: str | None = None,
    columns: list[str] | None = None,
) -> dict[str, Any]:
    """Returns the samples of a data set, and perhaps of one for the test, by the names of
    `fedml_noniid.from_arrays`.

    Items are pairs (sample, label), or dicts if `label` names the key of the label; `owner` then
    that of the owner. A sample may be a dict too. `columns` are the keys of samples that are
    used, all by default. A sample of one key, of bytes or floats, is x itself; others are inputs
    by name. UserError.
    """
    check_options(arrays_of, {"label": label, "owner": owner, "columns": columns})
    arrays = _arrays_of_part("dataset", dataset, label, owner, columns)
    if test is None:
        return arrays
    of_test = _arrays_of_part("test", test, label, owner, columns)
    classes, test_classes = arrays.get("classes", []), of_test.pop("classes", [])
    if classes != test_classes:
        allowed = ", ".join(classes) or "none, as in dataset"
        raise UserError(
            f"test has the classes {', '.join(test_classes) or 'none'}", allowed=allowed
        )
    return arrays | {f"test_{name}": values for name, values in of_test.items()}


def _arrays_of_part(
    part: str, dataset: Any, label: str | None, owner: str | None, columns: Sequence[str] | None
) -> dict[str, Any]:
    """x, y and perhaps owner and classes; `part` begins the place of a mistake."""
    items = _items(part, dataset)
    if label is None:
        if owner is not None:
            raise UserError(path=("owner",), value=owner, allowed="with label, for items as dicts")
        for i, item in enumerate(items):
            if not (isinstance(item, tuple | list) and len(item) == 2):
                allowed = "(sample, label); of dicts, `label` names the key of the label"
                raise UserError(path=(part, i), value=item, allowed=allowed)
        ys = [y for _, y in items]
        x = _samples(part, (0,), [x for x, _ in items], columns)
        return {"x": x, "y": _stacked(part, (1,), ys, NUMBERS + TEXT)}
    keys = {"y": label} if owner is None else {"y": label, "owner": owner}
    arrays: dict[str, Any] = {
        name: _stacked(part, (key,), _column(part, (), items, key), NUMBERS + TEXT)
        for name, key in keys.items()
    }
    samples = [{key: x for key, x in item.items() if key not in keys.values()} for item in items]
    arrays["x"] = _samples(part, (), samples, columns)
    if names := _class_names(dataset, label):
        arrays["classes"] = names
        wrong = np.flatnonzero((arrays["y"] < 0) | (arrays["y"] >= len(names)))
        if len(wrong):
            allowed = f"0 to {len(names) - 1}, a number of {', '.join(names)}"
            path = part, int(wrong[0]), label
            raise UserError(path=path, value=arrays["y"][wrong[0]].item(), allowed=allowed)
    return arrays


def _class_names(dataset: Any, label: str) -> list[str]:
    """Returns the names of the classes that a data set of Hugging Face has for its labels."""
    features = getattr(dataset, "features", None)
    feature = features.get(label) if isinstance(features, Mapping) else None
    return list(getattr(feature, "names", None) or [])


def _items(part: str, dataset: Any) -> list[Any]:
    if isinstance(dataset, Mapping) or not (
        hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    ):
        raise UserError(f"{part} is a {type(dataset).__name__}", allowed=ALLOWED)
    n = call(f"len() of {part}", len, dataset)
    if not n:
        raise UserError(f"{part} is empty", allowed="at least one item")
    return [call(f"item {i} of {part}", dataset.__getitem__, i) for i in range(n)]


def _samples(
    part: str, path: Path, samples: Sequence[Any], columns: Sequence[str] | None
) -> Array | dict[str, Array]:
    """x, or several inputs by name; `path` leads from an item to its sample."""
    if not isinstance(samples[0], Mapping):
        if columns is not None:
            raise UserError(path=("columns",), value=columns, allowed="for samples as dicts")
        return _stacked(part, path, samples)
    arrays = {
        name: _stacked(part, (*path, name), _column(part, path, samples, name))
        for name in (samples[0] if columns is None else columns)
    }
    if len(arrays) == 1:
        (x,) = arrays.values()
        if is_bytes(x) or x.dtype.kind == "f":
            return x
    return arrays


def _column(part: str, path: Path, rows: Sequence[Any], key: str) -> list[Any]:
    """The values of a key. UserError for a row without it, and for one that is no dict."""
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError(path=(part, i, *path), value=row, allowed=f"a dict with {key!r}")
        if key not in row:
            hints = among(key, map(str, row))
            raise UserError(f"has no {key!r}", path=(part, i, *path), **hints)
    return [row[key] for row in rows]


def _kind(array: Array) -> str:
    """The kinds of values that are not mixed: their common type would change their meaning."""
    if is_bytes(array):
        return "bytes"
    return "text" if array.dtype.kind == TEXT else "numbers"


def _stacked(part: str, path: Path, values: Sequence[Any], kinds: str = NUMBERS) -> Array:
    """The values of all items, [n, ...]. UserError unless they are alike, of one of the kinds."""
    arrays: list[Array] = []
    for i, value in enumerate(values):
        key_path = (part, i, *path)
        with located(*key_path):
            array = to_array("value", value)
        first = arrays[0] if arrays else array
        if array.dtype.kind not in kinds:
            allowed = "numbers or text" if TEXT in kinds else "numbers; leave out columns of text"
            raise UserError(path=key_path, value=value, allowed=allowed)
        if _kind(array) != _kind(first):
            raise UserError(
                f"is {array.dtype}, that of item 0 is {first.dtype}",
                path=key_path,
                allowed="one type",
            )
        if array.shape != first.shape:
            raise UserError(
                f"has shape {list(array.shape)}, that of item 0 has {list(first.shape)}",
                path=key_path,
                allowed="one shape, so pad first",
            )
        arrays.append(array)
    return np.stack(arrays)
