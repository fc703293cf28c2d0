"""The data sets by name: their readers, and the preprocessing that they share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import torch

from fedml_noniid.plugins.data.checks import known, options_of, refusal, whole_number
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
from fedml_noniid.plugins.data.readers.table import table
from fedml_noniid.plugins.data.readers.text import text
from fedml_noniid.plugins.data.readers.user_data import fraction_for_test
from fedml_noniid.plugins.data.subsample import subsample
from fedml_noniid.plugins.data.user_files import unreadable

# (root, **options) -> Raw, options keyword-only; the docstring names the files and where they come
# from.
Reader = Callable[..., Raw]
READERS: tuple[Reader, ...] = (
    digits,
    mnist,
    emnist,
    femnist,
    cifar10,
    cifar100,
    cinic10,
    sent140,
    made_tweets,
    table,
    text,
    image_folder,
    arrays,
)
DATASETS = {reader.__name__: reader for reader in READERS}


def check(name: str, options: Mapping[str, object]) -> None:
    """UserError unless data set `name` exists and takes these options.

    Only `load` checks them against the files.

    Beside its own, every data set takes `size` ([h, w], to scale its images to), `normalise` (see
    `Dataset.of`) and `samples` (how many of the training set are used).
    """
    reader = DATASETS[known("data set", name, DATASETS)]
    shared = {"size", "normalise", "samples"}
    options_of(
        reader,
        f"data set {name}",
        {k: v for k, v in options.items() if k not in shared},
        also=shared,
    )
    kinds = get_type_hints(reader)
    for key, value in options.items():
        if get_origin(kinds.get(key)) is Literal:
            known(f"data set {name}: {key}", value, get_args(kinds[key]))
        # Readers check their numbers. Names are checked here, so that the error names params.yaml.
        allowed = {kinds.get(key), *get_args(kinds.get(key))}
        if value is None and type(None) in allowed:
            continue
        if str in allowed and not isinstance(value, str):
            raise refusal(f"data set {name}: {key}", value, "text")
        if list[str] in allowed and not (
            isinstance(value, list) and all(isinstance(one, str) for one in value)
        ):
            raise refusal(f"data set {name}: {key}", value, "a list of names")
    fraction_for_test(options.get("test_share"))
    mean_and_deviation(options.get("normalise", "channel"))
    image_size(options.get("size"))
    if options.get("samples") is not None:
        whole_number("samples", options["samples"], 1)


def load(name: str, root: Path, **options: object) -> Dataset:
    """Data set `name`, from files under `root`.

    UserError for an unknown name or option, and for bad files.
    """
    check(name, options)
    reader, root = DATASETS[name], Path(root)
    size, normalise = options.pop("size", None), options.pop("normalise", "channel")
    samples = options.pop("samples", None)
    if "size" in inspect.signature(reader).parameters:
        options["size"] = size
    try:
        raw = reader(root, **options)
    except OSError as error:
        raise unreadable(root, error) from None
    if samples is not None:
        raw = _subsampled(raw, samples)
    shape = image_size(size)
    if shape is not None:
        raw = replace(raw, train_x=resized(raw.train_x, shape), test_x=resized(raw.test_x, shape))
    return Dataset.of(name, raw, normalise)


def _subsampled(raw: Raw, samples: object) -> Raw:
    """With fewer training samples. UserError for a number that the training set does not have."""
    if raw.train_owner is not None:
        raise refusal(
            "samples", samples, "none, since the data set has owners, who would lose theirs"
        )
    n = len(raw.train_y)
    rows = torch.from_numpy(subsample(raw.train_y.numpy(), whole_number("samples", samples, 1)))
    note = f"{len(rows)} of {n} training samples are used, drawn class by class"
    return replace(
        raw, train_x=raw.train_x[rows], train_y=raw.train_y[rows], notes=(*raw.notes, note)
    )
