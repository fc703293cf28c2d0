"""Fewer training samples than a data set has: `data.samples`."""

from __future__ import annotations

import numpy as np

from fedml_noniid.data.checks import whole_number
from fedml_noniid.data.rounding import rounded
from fedml_noniid.data.streams import stream
from fedml_noniid.data.types import Ints


def subsample(labels: Ints, samples: int) -> Ints:
    """Positions of `samples` of the n samples, ascending: stratified by class, the same draw every
    time. [n] -> [m]

    A class keeps at least one sample where all n are not too many. UserError for a number that
    isn't allowed.
    """
    labels = np.asarray(labels)
    classes, sizes = np.unique(labels, return_counts=True)
    n = len(labels)
    count = whole_number("samples", samples, len(classes), n, ", all of the training set")
    counts = np.maximum(rounded(count / n * sizes, count), 1)
    while counts.sum() > count:  # a class that rounds to none took one
        counts[counts.argmax()] -= 1
    rng = stream(0, "samples")
    drawn = [
        rng.permutation(np.flatnonzero(labels == label))[:n]
        for label, n in zip(classes, counts, strict=True)
    ]
    return np.sort(np.concatenate(drawn))
