"""What the partitions share: they draw counts per class and client, and deal the samples by these
counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import Range
from fedml_noniid.data.checks import whole_number
from fedml_noniid.data.ragged import Ragged
from fedml_noniid.data.types import Ints

# Attempts before a partition gives up. Digits with 20 clients, Dirichlet(0.1) and min_size 10 need
# 5 on average. With many clients and classes there are fewer attempts, so that a refusal takes
# seconds, not minutes.
MAX_ATTEMPTS = 20_000
MAX_DRAWS = 50_000_000

Concentration = Annotated[float, Range(0, 1_000_000, open="(")]  # of a symmetric Dirichlet
Exponent = Annotated[float, Range(0, 10, open="(")]  # of a power law of sizes


def minimum_size(min_size: object, n: int, n_clients: int, low: int = 1) -> int:
    """The smallest size allowed for a client; `low` to the equal share."""
    return whole_number(
        "min_size", min_size, low, n // n_clients, f" ({n} samples over {n_clients} clients)"
    )


def drawn_until(
    draw: Callable[[int], Ints],
    draws: int,
    n: int,
    n_clients: int,
    min_size: int,
    name: str,
    setting: str,
) -> Ints:
    """The first counts [C, n_clients] among independent attempts that give every client `min_size`
    of the `n` samples.

    `draw(attempts)` is [attempts, C, n_clients]; `draws` is how many random numbers one attempt
    takes. Raises UserError after a bounded number of attempts; it names the
    partition and the `setting` of its parameter.
    """
    attempts = max(1, min(MAX_ATTEMPTS, MAX_DRAWS // draws))
    batch = max(1, min(1024, 2**20 // draws))
    for _ in range(0, attempts, batch):
        counts = draw(batch)
        enough = np.flatnonzero(counts.sum(1).min(1) >= min_size)
        if len(enough):
            return np.asarray(counts[enough[0]])
    parameter = setting.partition("=")[0]
    raise UserError(
        f"{name}: {attempts} attempts gave no partition of {n} samples over {n_clients} clients "
        f"with {setting} and at least min_size={min_size} samples each; raise {parameter}, lower "
        "min_size or clients"
    )


def dirichlet_counts(
    sizes: Ints, n_clients: int, alpha: float, capped: bool, rng: np.random.Generator, attempts: int
) -> Ints:
    """Samples per class and client in independent attempts, [A, C, n_clients]; an impossible
    attempt is all 0."""
    counts = np.zeros((attempts, len(sizes), n_clients), np.int64)
    assigned = np.zeros((attempts, n_clients), np.int64)
    possible = np.ones(attempts, bool)
    for c, size in enumerate(sizes):
        share = rng.dirichlet(np.full(n_clients, alpha), attempts)
        if capped:
            share *= assigned < sizes.sum() / n_clients
        edges = share.cumsum(1)
        total = edges[:, -1:]
        # With a tiny alpha, a client that is full can have drawn the whole class.
        possible &= total[:, 0] > 0
        cuts = np.floor(edges / np.where(total > 0, total, 1) * size).astype(np.int64)
        counts[:, c] = np.diff(cuts, axis=1, prepend=0)
        assigned += counts[:, c]
    counts[~possible] = 0
    return counts


def assign_classes(
    quota: Ints, n_clients: int, per_client: int, rng: np.random.Generator
) -> NDArray[np.bool_]:
    """Which client holds which class: `per_client` classes for each, `quota[c]` clients for class
    c. [C, n_clients]

    A client takes the classes with most shards left, ties at random. So all shards are taken: no
    class ever has more shards left than clients are still to come.
    """
    left = quota.copy()
    assigned = np.zeros((len(quota), n_clients), bool)
    for client in rng.permutation(n_clients):
        chosen = np.lexsort((rng.random(len(quota)), -left))[:per_client]
        assigned[chosen, client] = True
        left[chosen] -= 1
    return assigned


def assign(labels: Ints, classes: Ints, counts: Ints, rng: np.random.Generator) -> list[Ints]:
    """Random samples of each class, `counts[c, k]` to client k; positions, ascending.

    Samples beyond them stay out.
    """
    members = (rng.permutation(np.flatnonzero(labels == label)) for label in classes)
    by_class = [cut(mine, row) for mine, row in zip(members, counts, strict=True)]
    return joined(*by_class)


def cut(positions: Ints, sizes: Ints) -> list[Ints]:
    """Contiguous parts of these sizes; what is left at the end stays out."""
    return np.split(positions, sizes.cumsum())[:-1]


def joined(*assigned: Sequence[Ints]) -> list[Ints]:
    """What each client got of several deals; positions, ascending."""
    return [np.sort(np.concatenate(parts)) for parts in zip(*assigned, strict=True)]


def by_client(client: Ints, n_clients: int) -> Ragged:
    """The positions of each client, ascending; `client` [n] is the holder of each sample, -1 for
    none."""
    order = np.argsort(client, kind="stable")
    edges = np.searchsorted(client[order], np.arange(n_clients + 1))
    return Ragged(order[edges[0] : edges[-1]], edges - edges[0])
