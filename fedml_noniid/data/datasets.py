"""The data sets by name: their readers, and the preprocessing that they share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator

from fedml_noniid.core.errors import known
from fedml_noniid.core.options import Count, check_options, model_of
from fedml_noniid.data.checks import refusal
from fedml_noniid.data.dataset import Dataset, Raw, mean_and_deviation
from fedml_noniid.data.readers import own
from fedml_noniid.data.readers.arrays import arrays
from fedml_noniid.data.readers.cifar import cifar10, cifar100
from fedml_noniid.data.readers.cinic import cinic10
from fedml_noniid.data.readers.digits import digits
from fedml_noniid.data.readers.emnist import emnist
from fedml_noniid.data.readers.femnist import femnist
from fedml_noniid.data.readers.images import Size, image_folder, resized
from fedml_noniid.data.readers.made_tweets import made_tweets
from fedml_noniid.data.readers.mnist import mnist
from fedml_noniid.data.readers.sent140 import sent140
from fedml_noniid.data.readers.table import table
from fedml_noniid.data.readers.text import text
from fedml_noniid.data.subsample import subsample
from fedml_noniid.data.user_files import unreadable, user_files
from fedml_noniid.own_code import check_arguments, function_of, names_code

# (root, **options) -> Raw, options keyword-only; the docstring names the files and where they come
# from.
Reader = Callable[..., Raw]
DATASETS: dict[str, Reader] = {
    "digits": digits,
    "mnist": mnist,
    "emnist": emnist,
    "femnist": femnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "cinic10": cinic10,
    "sent140": sent140,
    "made_tweets": made_tweets,
    "table": table,
    "text": text,
    "image_folder": image_folder,
    "arrays": arrays,
}
_checked: dict[str, Dataset] = {}  # of the last first call of `load_once`
# Options of readers that came later count where they are set, so that the fingerprints of earlier
# runs stay.
LATER = ("separator", "decimal", "encoding", "sheet")


@dataclass(frozen=True)
class Preprocessing:
    """What every data set takes beside the options of its reader."""

    size: Size | None = None  # [height, width], to scale images to
    normalise: Annotated[Any, BeforeValidator(mean_and_deviation)] = (
        "channel"  # see `Dataset.from_raw`
    )
    samples: Count | None = None  # how many of the training set are used; None: all


def find(name: str) -> Callable[..., Any]:
    """The reader of a name: one of ours, or a user's function as `package.module:name`.

    UserError.
    """
    return function_of("data set", name, DATASETS)


def check(name: str, options: Mapping[str, Any], also: Iterable[str] = ()) -> None:
    """UserError unless data set `name` exists and takes these options.

    Only `load` checks them against the files. `also`: keys that may stand beside them.
    """
    reader = find(name)
    if name in DATASETS:
        check_options((reader, Preprocessing), options, also)
        return
    shared = model_of(Preprocessing).model_fields
    check_options(Preprocessing, {key: options[key] for key in options if key in shared}, also)
    rest = {key: value for key, value in options.items() if key not in shared}
    check_arguments(reader, rest, own.FILLED)


def load(name: str, root: Path, **options: Any) -> Dataset:
    """Data set `name`, from files under `root`.

    UserError for an unknown name or option, and for bad files.
    """
    if not names_code(name):
        known("data set", name, DATASETS)
    check(name, options)
    reader, root = find(name), Path(root)
    shared = {field.name for field in fields(Preprocessing)}
    preprocessing = Preprocessing(**{key: value for key, value in options.items() if key in shared})
    try:
        if name in DATASETS:  # of ours, some take shared options too
            takes = inspect.signature(reader).parameters
            raw = reader(root, **{key: options[key] for key in options if key in takes})
        else:
            rest = {key: value for key, value in options.items() if key not in shared}
            raw = own.read(name, reader, root, rest)
    except OSError as error:
        raise unreadable(root, error) from None
    if preprocessing.samples is not None:
        raw = _thinned(raw, preprocessing.samples)
    if preprocessing.size is not None:
        shape = preprocessing.size[0], preprocessing.size[1]
        train_x, test_x = (resized(x, shape) for x in (raw.train_x, raw.test_x))
        raw = replace(raw, train_x=train_x, test_x=test_x, encode=None, without=None)
    return Dataset.from_raw(name, raw, preprocessing.normalise)


def load_once(name: str, root: Path, options: Mapping[str, Any]) -> Dataset:
    """As `load`, for a check and the stage behind it: of a user's own files that stayed the same,
    the second call returns the data set of the first, which nobody changes."""
    files = {} if names_code(name) else user_files(name, root, options)
    stats = [(str(path), path.stat()) for path in files.values()]
    marks = [(path, stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    key = repr((name, root, options, marks))
    data = _checked.pop(key, None)
    _checked.clear()
    if data is None:
        data = load(name, root, **options)
        _checked.update({key: data} if files else {})
    return data


def _thinned(raw: Raw, samples: int) -> Raw:
    """With fewer training samples. UserError for a number that the training set does not have."""
    if raw.train_owner is not None:
        raise refusal(
            "samples", samples, "none, since the data set has owners, who would lose theirs"
        )
    n = len(raw.train_y)
    rows = torch.from_numpy(subsample(raw.strata.train, samples))
    note = f"{len(rows)} of {n} training samples are used, drawn class by class"
    return replace(
        raw, train_x=raw.train_x[rows], train_y=raw.train_y[rows], notes=(*raw.notes, note)
    )
