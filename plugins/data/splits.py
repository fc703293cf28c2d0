"""What is cut from the training set before it is partitioned: a validation set and FNR-FL's public set."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from plugins.data.checks import real_number, refusal, whole_number
from plugins.data.streams import stream
from plugins.data.types import Ints


class Split(NamedTuple):
    """Positions in the training set, each ascending; together they are all of it, each position once."""

    train: Ints
    validation: Ints
    public: Ints


def hold_out(labels: Ints, validation: float, public: int, seed: int) -> Split:
    """Cuts a validation set and a public set from the training set.

    `labels` is [n]. `validation` is a share of all n samples in [0, 1), stratified by class. `public` is a count of
    samples, class-balanced (class counts differ by at most one): FNR-FL's D_public in its sound form. A cut leaves
    every class at least one training sample. The validation set does not depend on `public`.
    Raises UserError for a share or a count that isn't allowed.
    """
    labels = np.asarray(labels)
    classes, sizes = np.unique(labels, return_counts=True)
    for_validation = _stratified(sizes, validation)
    spare = sizes - for_validation - 1
    for_public = _balanced(spare, public, stream(seed, "public", 0))

    order_validation, order_public = stream(seed, "split"), stream(seed, "public", 1)
    parts: tuple[list[Ints], list[Ints]] = ([], [])
    for label, n_validation, n_public in zip(classes, for_validation, for_public, strict=True):
        members = order_validation.permutation(np.flatnonzero(labels == label))
        parts[0].append(members[:n_validation])
        parts[1].append(order_public.permutation(members[n_validation:])[:n_public])
    cut_validation, cut_public = (np.sort(np.concatenate([np.empty(0, np.int64), *part])) for part in parts)
    rest = np.setdiff1d(np.arange(len(labels)), np.concatenate([cut_validation, cut_public]))
    return Split(rest, cut_validation, cut_public)


def _stratified(sizes: Ints, share: float) -> Ints:
    """How many samples of each class make up `share` of all: largest remainders, no class used up. [C] -> [C]."""
    n = int(sizes.sum())
    real_number("validation", share, lambda s: 0 <= s < 1, "a number from 0 to below 1, the share of the training set")
    quota = share * sizes
    counts = np.floor(quota).astype(np.int64)
    missing = round(share * n) - int(counts.sum())
    by_remainder = np.argsort(counts - quota, kind="stable")
    counts[by_remainder[:missing]] += 1
    counts = np.minimum(counts, sizes - 1)
    if share > 0 and counts.sum() == 0:
        raise refusal("validation", share, f"0, or a share that is at least one of the {n} training samples")
    return counts


def _balanced(spare: Ints, total: int, rng: np.random.Generator) -> Ints:
    """How many samples of each class make up `total`, if class c has spare[c]: equal but for at most one. [C]."""
    if total == 0 and not isinstance(total, bool):
        return np.zeros_like(spare)
    n_classes = len(spare)
    each = int(spare.min())
    most = n_classes * each + int((spare > each).sum())
    because = f" (class-balanced, {n_classes} classes, one training sample of each class has to remain), or 0"
    base, extra = divmod(whole_number("public", total, n_classes, most if each else -1, because), n_classes)
    counts = np.full(n_classes, base)
    counts[rng.permutation(np.flatnonzero(spare > base))[:extra]] += 1
    return counts
