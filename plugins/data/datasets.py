"""The data sets by name: their readers, and the preprocessing that they share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from fedml_noniid.plugins.core.errors import UserError
from fedml_noniid.plugins.data.checks import known, options_of
from fedml_noniid.plugins.data.dataset import Dataset, Raw, mean_and_deviation
from fedml_noniid.plugins.data.readers.arrays import arrays
from fedml_noniid.plugins.data.readers.cifar import cifar10, cifar100
from fedml_noniid.plugins.data.readers.cinic import cinic10
from fedml_noniid.plugins.data.readers.digits import digits
from fedml_noniid.plugins.data.readers.emnist import emnist
from fedml_noniid.plugins.data.readers.femnist import femnist
from fedml_noniid.plugins.data.readers.images import image_folder, image_size, resized
from fedml_noniid.plugins.data.readers.made_tweets import made_tweets
from fedml_noniid.plugins.data.readers.mnist import mnist
from fedml_noniid.plugins.data.readers.sent140 import sent140

# (root, **options) -> Raw, options keyword-only; the docstring names the files and where they come from.
Reader = Callable[..., Raw]
READERS: tuple[Reader, ...] = (
    digits, mnist, emnist, femnist, cifar10, cifar100, cinic10, sent140, made_tweets, image_folder, arrays,
)  # fmt: skip
DATASETS = {reader.__name__: reader for reader in READERS}


def check(name: str, options: Mapping[str, object]) -> None:
    """UserError unless data set `name` exists and takes these options. Only `load` checks them against the files.

    Every data set takes `size` ([h, w], to scale its images to) and `normalise` (see `Dataset.of`) beside its own.
    """
    reader = DATASETS[known("data set", name, DATASETS)]
    shared = {"size", "normalise"}
    options_of(reader, f"data set {name}", {k: v for k, v in options.items() if k not in shared}, also=shared)
    kinds = get_type_hints(reader)
    for key, value in options.items():
        if get_origin(kinds.get(key)) is Literal:
            known(f"data set {name}: {key}", value, get_args(kinds[key]))
    mean_and_deviation(options.get("normalise", "channel"))
    image_size(options.get("size"))


def load(name: str, root: Path, **options: object) -> Dataset:
    """Data set `name`, from files under `root`. UserError for an unknown name or option, and for bad files."""
    check(name, options)
    reader, root = DATASETS[name], Path(root)
    size, normalise = options.pop("size", None), options.pop("normalise", "channel")
    if "size" in inspect.signature(reader).parameters:
        options["size"] = size
    try:
        raw = reader(root, **options)
    except OSError as error:
        raise UserError(f"{error.filename or root}: can't be read ({error.strerror or error})") from None
    shape = image_size(size)
    if shape is not None:
        raw = replace(raw, train_x=resized(raw.train_x, shape), test_x=resized(raw.test_x, shape))
    return Dataset.of(name, raw, normalise)
