"""Vectors of a frozen network in place of the samples."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from fedml_noniid.api.data import Data
from fedml_noniid.api.process import in_turn
from fedml_noniid.api.settings import plain
from fedml_noniid.api.split import check_data
from fedml_noniid.core.errors import UserError, located
from fedml_noniid.core.options import validated
from fedml_noniid.data.dataset import normalised
from fedml_noniid.models import name_of
from fedml_noniid.models.embed import EmbedSettings


@in_turn()
def embed(
    data: Data,
    model: Any,
    *,
    model_options: Mapping[str, Any] | None = None,
    init: str | Path = "",
    layer: str = "",
    batch: int = 256,
    normalise: Literal["none", "length", "channel"] = "none",
) -> Data:
    """The data set of the vectors that a frozen network makes of the samples, each of them once.

    `model` and `model_options`: as in `run`. `init`: the file of its weights. `layer`: a module of
    the network whose output is the vector; by default it is the input of the last linear layer.
    `batch`: samples of a pass, which decides about last bits. `normalise`: `length` divides each
    vector by its length, `channel` gives each number mean 0 and deviation 1 over the training set.
    A linear model on the vectors is `model="logistic_regression"`. UserError for a network that
    can't take the samples, and for a file that lacks weights.

    >>> import fedml_noniid as nd
    >>> nd.embed(nd.load("digits"), "mlp", model_options={"hidden": 16})  # of random weights
    digits: 1437 training and 360 test samples of 16, 10 classes
    note: samples are vectors of 16 numbers, the input of fc2 of mlp
    """
    check_data("embed", data, Data)
    options = {"model_options": plain(dict(model_options or {})), "init": str(init), "layer": layer}
    options |= {"model": name_of(model), "batch": plain(batch), "normalise": normalise}
    with located(source="embed"):
        how = validated(EmbedSettings, options)
        vectors = how.embedded(data.dataset, len(os.sched_getaffinity(0)))
    settings = {"name": data.name, "checksum": vectors.checksum}
    return Data(vectors, settings, from_memory=True, reader=partial(_as_vectors, data, how))


def _as_vectors(data: Data, how: EmbedSettings, x: Any) -> Tensor | None:
    """The vectors of new samples of `data`; None if `x` has none of these, so it may be vectors."""
    try:
        samples = data.samples(x)
    except UserError:
        if isinstance(x, np.ndarray | Tensor) and x.ndim == 2:
            return None
        raise
    dataset = data.dataset
    x = normalised(samples, dataset.mean, dataset.std)
    with in_turn():
        return how.vectors(x, len(dataset.classes), dataset.embedding)
