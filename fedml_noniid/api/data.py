"""Data sets: by name, or a user's own tables, texts and arrays."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from fedml_noniid.api.process import in_turn
from fedml_noniid.api.settings import plain
from fedml_noniid.core.errors import UserError, shown
from fedml_noniid.data import datasets
from fedml_noniid.data import unseen as unseen_owners
from fedml_noniid.data.dataset import Dataset, Raw
from fedml_noniid.data.inputs import to_array
from fedml_noniid.data.readers.arrays import of_named
from fedml_noniid.data.readers.items import arrays_of
from fedml_noniid.data.readers.table import of_frame
from fedml_noniid.data.readers.text import of_texts
from fedml_noniid.own_code import name_of

if TYPE_CHECKING:
    import pandas as pd

Normalise = Literal["channel", "half", "none"] | Sequence[float]


@dataclass(frozen=True, eq=False, repr=False)
class Data:
    """A data set in memory: a training set, a test set and the names of the classes or targets.

    >>> import fedml_noniid as nd
    >>> nd.load("digits").classes[:3]
    ('0', '1', '2')
    """

    dataset: Dataset
    settings: Mapping[
        str, Any
    ]  # the section `data` of params.yaml; of data from memory their name and checksum
    from_memory: bool = False
    # Reads new samples as it read its own; None for what it was not made of.
    reader: Callable[[Any], Tensor | None] | None = None

    @in_turn()
    def samples(self, x: object) -> Tensor:
        """New samples as this data set has its own, raw [n, ...].

        `x`: an array or a tensor of the shape of `dataset.test_x`; or what the data set was made
        of: rows of a table, texts, arrays. UserError for anything else.

        >>> import fedml_noniid as nd
        >>> data = nd.load("digits")
        >>> data.samples(data.dataset.test_x[:5].numpy()).shape
        torch.Size([5, 1, 8, 8])
        """
        encoded = None if self.reader is None else self.reader(x)
        if encoded is None:
            return _like(self.dataset, x)
        return encoded.to(self.dataset.train_x.dtype)

    def without(self, unseen: int | Sequence[str]) -> Data:
        """This table read anew without some owners, to whose rows then nothing is fitted.

        `unseen`: their names, or how many are drawn, always the same ones. `dataset.unseen_x` and
        `unseen_y` have their samples. UserError for data without named owners, and for other names.

        >>> import fedml_noniid as nd
        >>> import pandas as pd
        >>> rows = [{"age": a, "ill": int(a > 50), "ward": f"w{a % 4}"} for a in range(20, 80)]
        >>> data = nd.from_frame(pd.DataFrame(rows), label="ill", owner="ward")
        >>> data.without(["w3"]).dataset.unseen_x.shape
        torch.Size([15, 1])
        """
        dataset = unseen_owners.without(self.dataset, plain(unseen))
        settings = {"checksum": dataset.checksum} if self.from_memory else {}
        return Data(dataset, {**self.settings, **settings}, self.from_memory, dataset.encode)

    @property
    def name(self) -> str:
        """The name of the data set."""
        return self.dataset.name

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, or of the targets if these are no classes."""
        return tuple(self.dataset.classes)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of results has to know about the data."""
        return tuple(self.dataset.notes)

    def __repr__(self) -> str:
        dataset = self.dataset
        shape = " x ".join(map(str, dataset.train_x.shape[1:]))
        facts = f"{len(dataset.train_y)} training and {len(dataset.test_y)} test samples of {shape}"
        owners = (
            ""
            if dataset.train_owner is None
            else f", {len(set(dataset.train_owner.tolist()))} owners"
        )
        what = "classes" if dataset.has_classes else "targets"
        lines = [f"{self.name}: {facts}, {len(self.classes)} {what}{owners}"]
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


@in_turn()
def load(name: str | Callable[..., Any], *, root: str | Path = "data/raw", **options: Any) -> Data:
    """A data set of params.yaml by its name, or what a function of yours reads.

    A function, or its name `package.module:function`, returns arrays or data sets of torch;
    docs/own_data.md says how.

    `root`: the folder of its files; missing files are downloaded there where possible. `options`:
    those of the data set and of all data sets (`size`, `normalise`). UserError for an unknown name
    or option, and for bad files.

    >>> import fedml_noniid as nd
    >>> nd.load("digits")
    digits: 1437 training and 360 test samples of 1 x 8 x 8, 10 classes
    """
    options = {key: plain(value) for key, value in options.items() if value is not None}
    name = name_of(name) if callable(name) else name
    raw = datasets.load(name, _path("root", root), **options)
    return Data(raw, {"name": name, "root": str(root), **options}, reader=raw.encode)


@in_turn()
def from_frame(
    frame: pd.DataFrame,
    test: pd.DataFrame | None = None,
    *,
    label: str | None = None,
    target: str | Sequence[str] | None = None,
    normalise: Normalise = "channel",
    name: str = "frame",
    **options: Any,
) -> Data:
    """A table in memory with one row per sample.

    `label`: the column of the class. `target` in its place, for a loss such as mse or bce: the
    columns of numbers, or of labels as 0 and 1. `test`: the test set. `normalise`: as in
    params.yaml. Options, none of them needed:

    - `owner`: the column that says whose row it is, for the partitions `natural` and
      `natural_grouped`
    - `features`: the columns of numbers, by default all others
    - `one_hot`: columns of categories
    - `drop`: columns that are not used
    - `missing`: what becomes of cells without a value. `median` and `mode` fill them by the
      training rows, `drop` leaves their rows out; by default they are refused. `category` is
      `median`, with a category of their own for missing categories
    - `na`: texts of cells that count as missing, such as `<0.6`
    - `test_share`: the share of the rows that is the test set, if `test` is not given (0.2)

    UserError for columns and values that don't fit.

    >>> import fedml_noniid as nd
    >>> import pandas as pd
    >>> rows = [
    ...     {"age": age, "pulse": 60 + age % 7, "ill": age % 2, "ward": f"w{age % 3}"}
    ...     for age in range(20, 80)
    ... ]
    >>> data = nd.from_frame(pd.DataFrame(rows), label="ill", owner="ward")
    >>> data.classes
    ('0', '1')
    >>> len(nd.partition(data, "natural", clients=3).table)
    3
    """
    columns = {"label": label, "target": target, **options}
    return _of_rows(name, of_frame, (frame, test), columns, normalise)


@in_turn()
def from_texts(
    frame: pd.DataFrame,
    test: pd.DataFrame | None = None,
    *,
    text: str,
    label: str,
    vectors: str | Path = ".",
    name: str = "texts",
    **options: Any,
) -> Data:
    """A table in memory with a column of text, for the model `lstm`.

    `text`: the column of the text. `vectors`: the folder where GloVe's file may lie. Options:
    `vocabulary` (3000): how many tokens are known. `length` (50): tokens per text. `owner` and
    `test_share`, `test` and `label` are as in `from_frame`. UserError for columns and values that
    don't fit.

    >>> import fedml_noniid as nd
    >>> import pandas as pd
    >>> lines = [("a good day", "glad"), ("a bad day", "sad")] * 10
    >>> table = pd.DataFrame(lines, columns=["line", "mood"])
    >>> nd.from_texts(table, text="line", label="mood", length=5).classes
    ('glad', 'sad')
    """
    read = partial(of_texts, vectors=_path("vectors", vectors))
    columns = {"text": text, "label": label}
    return _of_rows(name, read, (frame, test), {**columns, **options}, "channel")


@in_turn()
def from_arrays(
    x: ArrayLike | Mapping[str, ArrayLike],
    y: ArrayLike,
    test_x: ArrayLike | Mapping[str, ArrayLike] | None = None,
    test_y: ArrayLike | None = None,
    *,
    normalise: Normalise = "channel",
    name: str = "arrays",
    **options: Any,
) -> Data:
    """Arrays in memory: samples [n, features], grey images [n, h, w] or images with channels;
    labels [n]; or targets: floats [n] or [n, t], or several labels as 0 and 1, [n, C]. x may be a
    dict of several inputs of a network of your own, each [n, ...]: numbers, bytes from 0 to 255, or
    whole numbers up to 2^24 such as those of tokens.

    Options: `owner`, `test_owner`: whose sample it is, [n]. `classes`: names of the labels 0, 1,
    ..., or the order of labels that are text, or names of the targets. `layout` of images with
    channels: `CHW`, `HWC` or `auto`. Without `test_x` and `test_y` the share `test_share` (0.2) of
    the samples is the test set. UserError for arrays that don't fit.

    >>> import fedml_noniid as nd
    >>> import numpy as np
    >>> nd.from_arrays(np.random.default_rng(0).random((50, 4)), np.arange(50) % 2)
    arrays: 40 training and 10 test samples of 4, 2 classes
    note: test set: 10 of 50 samples, drawn by label with a fixed seed
    """
    raw = of_named({"x": x, "y": y, "test_x": test_x, "test_y": test_y, **options})
    return _of(name, raw, normalise)


@in_turn()
def from_dataset(
    dataset: Any,
    test: Any = None,
    *,
    label: str | None = None,
    owner: str | None = None,
    columns: str | Sequence[str] | None = None,
    normalise: Normalise = "channel",
    name: str = "dataset",
    **options: Any,
) -> Data:
    """Reads a data set of torch or of Hugging Face into memory, or anything with `len()` and items
    by number.

    Items are pairs (sample, label), or dicts: then `label` is the key of the label, and `owner`
    that of the owner. `columns`: the keys of a sample that are used, all others by default. One of
    bytes or floats is x itself. Several, or whole numbers such as those of tokens, are the
    inputs of a network of your own, by name. Names of classes are those of Hugging Face's
    `ClassLabel`. `test`: the test set. `options`: `classes`, `layout` and `test_share` as in
    `from_arrays`. UserError for items that are unlike each other or no numbers, with the item's
    number, key and value.

    >>> import fedml_noniid as nd
    >>> pairs = [([n / 50, 1.0], n % 2) for n in range(50)]
    >>> nd.from_dataset(pairs[:40], test=pairs[40:])
    dataset: 40 training and 10 test samples of 2, 2 classes
    """
    chosen = [columns] if isinstance(columns, str) else plain(columns)
    arrays = arrays_of(dataset, test, label=label, owner=owner, columns=chosen)
    return _of(name, of_named({**arrays, **options}), normalise)


def _of(name: str, raw: Raw, normalise: Normalise) -> Data:
    how = plain(normalise)
    dataset = Dataset.from_raw(name, raw, how)
    settings = {"name": name, "normalise": how, "checksum": dataset.checksum}
    return Data(dataset, settings, from_memory=True, reader=raw.encode)


def _of_rows(
    name: str,
    read: Callable[..., Raw],
    frames: tuple[pd.DataFrame, pd.DataFrame | None],
    options: Mapping[str, Any],
    normalise: Normalise,
) -> Data:
    """Data of a table and perhaps a table for tests. `read` takes them with the options."""
    # The reader has columns' names as text: a table made of an array has numbers as names.
    columns = ("label", "owner", "text", "target")
    named: dict[str, Any] = {
        key: _names(value)
        if key not in columns or value is None or isinstance(value, list | tuple)
        else str(value)
        for key, value in options.items()
    }
    return _of(name, read(*frames, **named), normalise)


def _names(value: Any) -> Any:
    """The names in a list as text; any other value as it is."""
    return [str(name) for name in value] if isinstance(value, list | tuple) else value


def _like(dataset: Dataset, x: object) -> Tensor:
    """An array as raw samples. UserError unless it has their shape and kind of numbers."""
    tensor, known = to_array("x", x), dataset.train_x
    if tensor.shape[1:] != tuple(known.shape[1:]) or tensor.dtype.kind not in "biuf":
        shape = ", ".join(["n", *map(str, known.shape[1:])])
        raise UserError(f"x is {tensor.dtype} {list(tensor.shape)}; allowed: numbers [{shape}]")
    if known.is_floating_point():
        fits, allowed = np.isfinite(tensor), "finite numbers"
    else:
        most = 255 if dataset.embedding is None else len(dataset.embedding) - 1
        fits, allowed = (
            (tensor >= 0) & (tensor <= most) & (tensor == np.rint(tensor)),
            f"whole numbers from 0 to {most}",
        )
    if not fits.all():
        at = tuple(np.argwhere(~fits)[0].tolist())
        raise UserError(
            f"x{list(at)} = {tensor[at]} is refused; allowed: {allowed}, not normalised"
        )
    return torch.from_numpy(tensor.astype(dataset.dtype))


def _path(key: str, path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise UserError(f"{key} = {shown(path)} is refused; allowed: a path")
    return Path(path)
