"""Quantity skew: labels are alike on all clients; sizes are equal, given, by a law, or drawn from a
Dirichlet."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from numbers import Integral
from typing import Literal

import numpy as np

from fedml_noniid.core.options import Count, Positive
from fedml_noniid.data.checks import refusal
from fedml_noniid.data.partitions.assigning import (
    Concentration,
    Exponent,
    assign,
    cut,
    dirichlet_counts,
    drawn_until,
    minimum_size,
)
from fedml_noniid.data.rounding import rounded
from fedml_noniid.data.types import Floats, Ints


def iid(labels: Ints, n_clients: int, rng: np.random.Generator) -> list[Ints]:
    """All samples are shuffled and divided evenly: sizes differ by at most one."""
    return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), n_clients)]


def iid_unbalanced(
    labels: Ints,
    n_clients: int,
    rng: np.random.Generator,
    *,
    sizes: Literal["power_law", "lognormal"] = "power_law",
    min_size: Count = 10,
    exponent: Exponent | None = None,
) -> list[Ints]:
    """All samples are shuffled and divided in sizes by a law (FedNNNN's IID-UB: a power law, its
    exponent not stated).

    `power_law`: n_k is in proportion to k^-exponent (1.2), where client 0 has k = 1. `lognormal`:
    n_k is in proportion to a draw of exp(N(0, 1)). Each client has at least `min_size`;
    the sizes add up to all samples exactly.
    """
    n = len(labels)
    min_size = minimum_size(min_size, n, n_clients)
    weights = relative_sizes(sizes, n_clients, rng, exponent)
    cuts = exact_sizes(weights, n, min_size).cumsum()[:-1]
    return [np.sort(part) for part in np.split(rng.permutation(n), cuts)]


def by_sizes(
    labels: Ints, n_clients: int, rng: np.random.Generator, *, sizes: list[Positive]
) -> list[Ints]:
    """All samples are shuffled; client k gets `sizes[k]` of them: whole numbers, or fractions of
    all samples.

    Fractions are rounded by largest remainders, so the sizes add up to the rounded sum. Samples
    beyond the sum are left out.
    """
    n = len(labels)
    counts = _given_sizes(sizes, n_clients, n)
    return [np.sort(part) for part in cut(rng.permutation(n), counts)]


def quantity(
    labels: Ints,
    n_clients: int,
    rng: np.random.Generator,
    *,
    beta: Concentration = 0.5,
    min_size: Count = 10,
) -> list[Ints]:
    """One Dirichlet(beta) over the clients cuts a random permutation (NIID-Bench's
    `iid-diff-quantity`; FNR-FL's 0.5).

    The draw is repeated until the smallest client has `min_size` samples. NIID-Bench checks the
    share times n, before the cuts are rounded down, and so can end with 9. Raises UserError after a
    bounded number of attempts.
    """
    n = len(labels)
    min_size = minimum_size(min_size, n, n_clients)
    draw = partial(dirichlet_counts, np.array([n]), n_clients, beta, False, rng)
    counts = drawn_until(draw, n_clients, n, n_clients, min_size, "quantity", f"beta={beta:g}")
    return assign(np.zeros(n, np.int64), np.array([0]), counts, rng)


def _given_sizes(sizes: Sequence[float], n_clients: int, n: int) -> Ints:
    """The samples of each client, [N].

    UserError unless there is one size per client and the samples are enough.
    """
    if len(sizes) != n_clients:
        allowed = f"a list of {n_clients} sizes, one per client, not {len(sizes)}"
        raise refusal("sizes", sizes, allowed)
    whole = {isinstance(size, Integral) for size in sizes}
    if len(whole) == 2:
        raise refusal("sizes", sizes, "whole numbers for all clients, or fractions for all")
    total = sum(sizes)
    if total > (n if True in whole else 1 + 1e-9):  # the sum 0.7 + 0.2 + 0.1 is rounded
        allowed = f"a sum of at most {n} training samples, or of fractions of at most 1"
        raise refusal("sizes", sizes, f"{allowed}, not {total:g}")
    if True in whole:
        return np.array(sizes, np.int64)
    counts = rounded(np.array(sizes, np.float64) * n, round(min(total, 1.0) * n))
    if not counts.all():
        k = int(counts.argmin())
        raise refusal(
            f"sizes[{k}]", sizes[k], f"a fraction that gives at least one of {n} training samples"
        )
    return counts


def relative_sizes(
    law: str, n_clients: int, rng: np.random.Generator, exponent: float | None
) -> Floats:
    """The sizes of clients by a law, [N]. UserError for an exponent of another law."""
    if exponent is not None and law != "power_law":
        raise refusal("exponent", exponent, f"none with sizes={law}; it belongs to power_law")
    weights: Floats = np.ones(n_clients)
    if law == "power_law":
        weights = np.arange(1.0, n_clients + 1) ** -(exponent or 1.2)
    if law == "lognormal":
        weights = np.exp(rng.standard_normal(n_clients))
    return weights


def exact_sizes(weights: Floats, total: int, min_size: int) -> Ints:
    """`total` in proportion to `weights`, each size at least `min_size`; rounded by largest
    remainders. [N] -> [N]

    n_k = max(min_size, lambda w_k), and lambda makes the sizes add up. `total` is at least N
    min_size.
    """
    at_least = np.zeros(len(weights), bool)
    while True:  # ends: each pass raises some clients to min_size, and never all of them
        rate = (total - min_size * at_least.sum()) / weights[~at_least].sum()
        below = ~at_least & (rate * weights < min_size * (1 - 1e-12))
        if not below.any():
            break
        at_least |= below
    return rounded(np.where(at_least, min_size, np.maximum(rate * weights, min_size)), total)
