"""How uneven a partition is: pure functions of labels and index lists."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedml_noniid.data.ragged import Ragged
from fedml_noniid.data.types import Floats, Ints


def class_counts(labels: Ints, clients: Sequence[Ints], n_classes: int) -> Ints:
    """Samples per client and class, [N, C]; `labels` [n] of the whole training set."""
    lists = Ragged.from_lists(clients)
    cell = lists.holder * n_classes + np.asarray(labels)[lists.flat]
    return np.bincount(cell, minlength=len(lists) * n_classes).reshape(len(lists), n_classes)


def entropy(counts: Ints) -> Floats:
    """Entropy of each client's labels in bits: 0 for one class, log2(C) for equal classes.

    [N, C] -> [N]
    """
    p = _shares(counts)
    # Adding zero turns -0.0 into 0.0.
    return np.asarray(-(p * np.log2(np.where(p > 0, p, 1))).sum(1) + 0.0)


def label_distance(counts: Ints) -> Floats:
    """Total variation distance between each client's label distribution and that of all clients
    together.

    1/2 sum_c |p_k(c) - p(c)|, from 0 (equal) to 1 (no class in common); half of the EMD of Zhao et
    al. 2018. [N, C] -> [N]
    """
    p = counts.sum(0) / counts.sum()
    return np.asarray(0.5 * np.abs(_shares(counts) - p).sum(1))


def hellinger(counts: Ints) -> Floats:
    """Hellinger distance between each client's label distribution and that of all clients together.

    sqrt(1 - sum_c sqrt(p_k(c) p(c))), from 0 (equal) to 1 (no class in common). [N, C] -> [N]
    """
    p = counts.sum(0) / counts.sum()
    return np.asarray(np.sqrt(np.maximum(0, 1 - np.sqrt(_shares(counts) * p).sum(1))))


def gini(sizes: Ints) -> float:
    """Gini coefficient of the clients' sizes [N]: 0 if all are equal, (N-1)/N if one client has
    everything."""
    ascending = np.sort(np.asarray(sizes, np.float64))
    n = len(ascending)
    rank = np.arange(1, n + 1)
    return float(((2 * rank - n - 1) * ascending).sum() / (n * ascending.sum()))


def summary(counts: Ints) -> dict[str, float]:
    """One partition in a few numbers, from its class counts [N, C]; entropies are in bits."""
    sizes = counts.sum(1)
    bits, distance = entropy(counts), label_distance(counts)
    return {
        "clients": len(sizes),
        "classes": counts.shape[1],
        "samples": int(sizes.sum()),
        "size_min": int(sizes.min()),
        "size_mean": float(sizes.mean()),
        "size_max": int(sizes.max()),
        "size_gini": gini(sizes),
        "classes_per_client_mean": float((counts > 0).sum(1).mean()),
        "entropy_mean": float(bits.mean()),
        "entropy_min": float(bits.min()),
        "label_distance_mean": float(distance.mean()),
        "label_distance_max": float(distance.max()),
        "label_hellinger_mean": float(
            f"{hellinger(counts).mean():.10g}"
        ),  # for any order of the sum
    }


def _shares(counts: Ints) -> Floats:
    """Rows as distributions."""
    return np.asarray(counts / counts.sum(1, keepdims=True))
