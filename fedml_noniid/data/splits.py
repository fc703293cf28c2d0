"""The parts cut from the training set before it is partitioned: a validation set and FNR-FL's
public set."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedml_noniid.data.checks import refusal, whole_number
from fedml_noniid.data.partitions.assigning import by_client
from fedml_noniid.data.rounding import rounded
from fedml_noniid.data.streams import stream
from fedml_noniid.data.types import Ints


class TrainingParts(NamedTuple):
    """Positions in the training set, each part ascending. Every position is in exactly one part."""

    train: Ints
    validation: Ints
    public: Ints


def hold_out(labels: Ints, validation: float, public: int, seed: int) -> TrainingParts:
    """Cuts a validation set and a public set from the training set.

    `labels` is [n]. `validation` is a share of all n samples in [0, 1), stratified by class.
    `public` is a count of samples, class-balanced (class counts differ by at most one): FNR-FL's
    D_public in its sound form. Every class keeps at least one training sample. The validation set
    does not depend on `public`. Raises UserError for a share or a count that isn't allowed.
    """
    labels = np.asarray(labels)
    classes, sizes = np.unique(labels, return_counts=True)
    for_validation = _stratified(sizes, validation)
    spare = sizes - for_validation - 1
    if public != 0 and spare.min() == 0 and sizes.min() > 1:
        raise refusal(
            "validation",
            validation,
            f"a smaller share: it leaves a class no sample for public={public!r}",
        )
    for_public = _balanced(spare, public, stream(seed, "public", 0))

    order_validation, order_public = stream(seed, "split"), stream(seed, "public", 1)
    part = np.zeros(len(labels), np.int64)  # 0: train, 1: validation, 2: public
    for label, n_validation, n_public in zip(classes, for_validation, for_public, strict=True):
        members = order_validation.permutation(np.flatnonzero(labels == label))
        part[members[:n_validation]] = 1
        part[order_public.permutation(members[n_validation:])[:n_public]] = 2
    return TrainingParts(*by_client(part, 3))


def _stratified(sizes: Ints, share: float) -> Ints:
    """How many samples of each class make up `share` of all, by largest remainders; each class
    keeps one. [C] -> [C]"""
    n = int(sizes.sum())
    counts = np.minimum(rounded(share * sizes, round(share * n)), sizes - 1)
    if share > 0 and counts.sum() == 0:
        raise refusal(
            "validation", share, f"0, or a share that is at least one of the {n} training samples"
        )
    return counts


def _balanced(spare: Ints, total: int, rng: np.random.Generator) -> Ints:
    """How many samples of each class make up `total`: equal but for at most one, at most spare[c]
    of class c. [C]"""
    if total == 0:
        return np.zeros_like(spare)
    n_classes = len(spare)
    each = int(spare.min())
    most = n_classes * each + int((spare > each).sum())
    because = (
        f" (class-balanced, {n_classes} classes, one training sample of each class has to "
        "remain), or 0"
    )
    base, extra = divmod(
        whole_number("public", total, n_classes, most if each else -1, because), n_classes
    )
    counts = np.full(n_classes, base)
    counts[rng.permutation(np.flatnonzero(spare > base))[:extra]] += 1
    return counts
