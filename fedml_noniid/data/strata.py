"""Puts samples into strata: where targets are no classes, partitions and splits go by these.

Numbers: tenths of the training targets, by size (the first column if there are several). Labels of
which a sample may have several: the rarest one that it has. Both are conventions of this project.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedml_noniid.data.types import Floats, Ints

BINS = 10
NONE = "none"  # the stratum of samples without a label


class Strata(NamedTuple):
    """The strata of training and test samples."""

    names: tuple[str, ...]
    train: Ints  # [n]
    test: Ints  # [m]


def are_labels(*ys: Floats) -> bool:
    """Whether all targets are 0 or 1."""
    return all(bool(np.isin(y, (0, 1)).all()) for y in ys)


def strata(train_y: Floats, test_y: Floats, names: Sequence[str]) -> Strata:
    """The strata of targets [n, t] and [m, t] with these `names`; those of training decide."""
    ys = train_y, test_y
    if are_labels(*ys):
        often = train_y.sum(0)
        # From the rarest: the first that a sample has. A column of ones stands for none.
        order = np.argsort(often, kind="stable")
        of_order = [np.column_stack([y[:, order], np.ones(len(y))]).argmax(1) for y in ys]
        number = np.append(order, len(names)).astype(np.int64)
        return Strata((*names, NONE), *(number[rank] for rank in of_order))
    edges = np.unique(np.quantile(train_y[:, 0], np.arange(1, BINS) / BINS, method="lower"))
    edges = edges[edges < train_y[:, 0].max()]
    ends = [f"{edge:.4g}" for edge in edges]
    titles = [f"to {end}" for end in ends] + [f"above {ends[-1]}" if ends else "all"]
    return Strata(
        tuple(titles), *(np.searchsorted(edges, y[:, 0], side="left").astype(np.int64) for y in ys)
    )
