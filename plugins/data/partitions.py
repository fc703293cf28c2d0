"""Who holds which samples: IID, Dirichlet label skew, shards.

Every partition is a function `(labels [n], n_clients, rng, **params) -> n_clients ascending arrays of positions`;
every position lies in exactly one of them and none is empty. What can't work is refused before anything is drawn.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from plugins.core.errors import UserError
from plugins.data.checks import known, options_of, real_number, refusal, whole_number
from plugins.data.randomness import stream
from plugins.data.types import Ints

# Attempts of `dirichlet` before it gives up. Digits with 20 clients, alpha 0.1 and min_size 10 needs 5 on average.
# With many clients and classes it gives up after fewer, so that a refusal takes seconds, not minutes.
MAX_ATTEMPTS = 20_000
MAX_DRAWS = 50_000_000


def iid(labels: Ints, n_clients: int, rng: np.random.Generator) -> list[Ints]:
    """Pooled, shuffled, dealt evenly: sizes differ by at most one."""
    n_clients = _clients(n_clients, len(labels))
    return [np.sort(part) for part in np.array_split(rng.permutation(len(labels)), n_clients)]


def dirichlet(
    labels: Ints, n_clients: int, rng: np.random.Generator, *, alpha: float, min_size: int = 10, cap: object = "on"
) -> list[Ints]:
    """Label skew: class by class, shares over the clients from Dirichlet(alpha); lower alpha, more skew.

    As NIID-Bench's `noniid-labeldir` (after Yurochkin et al. 2019): a client that already holds N/n samples gets
    nothing of the next class (`cap`; "off" leaves sizes free, FedNLR), and all is redrawn until the smallest
    client has `min_size` samples. Class counts decide that, so attempts draw counts only and the samples are dealt
    once. Raises UserError if a bounded number of attempts doesn't get there.
    """
    n = len(labels)
    n_clients = _clients(n_clients, n)
    alpha = real_number("alpha", alpha, lambda a: 0 < a <= 1e6, "a number above 0, at most 1e6")
    min_size = whole_number("min_size", min_size, 1, n // n_clients, f" ({n} samples over {n_clients} clients)")
    capped = _switch("cap", cap)

    classes, sizes = np.unique(labels, return_counts=True)
    draws = len(classes) * n_clients  # of one attempt
    attempts = max(1, min(MAX_ATTEMPTS, MAX_DRAWS // draws))
    batch = max(1, min(1024, 2**20 // draws))
    for _ in range(0, attempts, batch):
        counts = _dirichlet_counts(sizes, n_clients, alpha, capped, rng, batch)  # [A, C, n_clients]
        enough = np.flatnonzero(counts.sum(1).min(1) >= min_size)
        if len(enough):
            return _deal(labels, classes, counts[enough[0]], rng)
    raise UserError(
        f"dirichlet: {attempts} attempts gave no partition of {n} samples over {n_clients} clients with "
        f"alpha={alpha:g} and at least min_size={min_size} samples each; raise alpha, lower min_size or clients"
    )


def shards(labels: Ints, n_clients: int, rng: np.random.Generator, *, classes_per_client: int) -> list[Ints]:
    """Every client holds exactly `classes_per_client` classes, in unequal amounts (FedNLR; as PFLlib's `pat`).

    The classes are dealt evenly, so each is held by floor or ceil of n_clients * classes_per_client / C clients; it
    is then cut among them at uniformly random points, none getting less than 1/10 of the equal share.
    """
    n_clients = _clients(n_clients, len(labels))
    classes, sizes = np.unique(labels, return_counts=True)
    n_classes = len(classes)
    per_client = whole_number("classes_per_client", classes_per_client, 1, n_classes, " (classes in the training set)")
    if n_clients * per_client < n_classes:
        allowed = f"at least {-(-n_classes // n_clients)}: {n_clients} clients have to hold all {n_classes} classes"
        raise refusal("classes_per_client", per_client, allowed)

    holders, extra = divmod(n_clients * per_client, n_classes)
    if sizes.min() < holders or (sizes > holders).sum() < extra:
        few = classes[sizes.argmin()]
        raise UserError(
            f"shards: {n_clients} clients with classes_per_client={per_client} need {holders + (extra > 0)} shards of "
            f"each class, but class {few} has {sizes.min()} samples; lower clients or classes_per_client"
        )
    quota = np.full(n_classes, holders)  # shards of each class
    quota[rng.permutation(np.flatnonzero(sizes > holders))[:extra]] += 1

    held = _deal_classes(quota, n_clients, per_client, rng)  # [C, n_clients] bool
    counts = np.zeros((n_classes, n_clients), np.int64)
    for c, size in enumerate(sizes):
        counts[c, held[c]] = _random_cut(int(size), int(quota[c]), rng)
    return _deal(labels, classes, counts, rng)


PARTITIONS: dict[str, Callable[..., list[Ints]]] = {"iid": iid, "dirichlet": dirichlet, "shards": shards}


def partition(name: str, labels: Ints, indices: Ints, n_clients: int, seed: int, **params: object) -> list[Ints]:
    """Partition `name` of the training samples `indices`, as indices into the training set.

    `labels` are those of the whole training set [n]; `indices` are distinct. Each client's indices ascend; every
    index lies with exactly one client. Raises UserError for an unknown name or parameter and for values that don't
    fit the data.
    """
    function = PARTITIONS[known("partition", name, PARTITIONS)]
    options_of(function, f"partition {name}", params)
    indices = np.sort(np.asarray(indices, dtype=np.int64))
    clients = function(np.asarray(labels)[indices], n_clients, stream(seed, "partition"), **params)
    return [indices[positions] for positions in clients]


def _clients(n_clients: object, n: int) -> int:
    return whole_number("clients", n_clients, 1, n, f" ({n} training samples)")


def _switch(key: str, value: object) -> bool:
    # YAML 1.1 reads a bare `on` as true, YAML 1.2 as text.
    if isinstance(value, bool):
        return value
    if value in ("on", "off"):
        return value == "on"
    raise refusal(key, value, "on, off")


def _dirichlet_counts(
    sizes: Ints, n_clients: int, alpha: float, capped: bool, rng: np.random.Generator, attempts: int
) -> Ints:
    """Samples per class and client for some independent attempts; an impossible one has an empty client. [A, C, n]"""
    counts = np.zeros((attempts, len(sizes), n_clients), np.int64)
    held = np.zeros((attempts, n_clients), np.int64)
    possible = np.ones(attempts, bool)
    for c, size in enumerate(sizes):
        share = rng.dirichlet(np.full(n_clients, alpha), attempts)
        if capped:
            share *= held < sizes.sum() / n_clients
        edges = share.cumsum(1)
        total = edges[:, -1:]
        # With a tiny alpha a full client can have drawn the whole class.
        possible &= total[:, 0] > 0
        cuts = np.floor(edges / np.where(total > 0, total, 1) * size).astype(np.int64)
        counts[:, c] = np.diff(cuts, axis=1, prepend=0)
        held += counts[:, c]
    counts[~possible] = 0
    return counts


def _deal_classes(quota: Ints, n_clients: int, per_client: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which client holds which class: `per_client` classes for each, `quota[c]` clients for class c. [C, n_clients]

    A client takes the classes with most shards left, ties at random. That always comes out even: no class can have
    more shards left than there are clients to come.
    """
    left = quota.copy()
    held = np.zeros((len(quota), n_clients), bool)
    for client in rng.permutation(n_clients):
        chosen = np.lexsort((rng.random(len(quota)), -left))[:per_client]
        held[chosen, client] = True
        left[chosen] -= 1
    return held


def _random_cut(size: int, parts: int, rng: np.random.Generator) -> Ints:
    """`size` as a sum of `parts` random numbers, each at least a tenth of the equal share and at least 1. [parts]"""
    least = -(-size // (10 * parts))
    rest = size - least * parts
    cuts = np.sort(rng.integers(0, rest, parts - 1, endpoint=True))
    return least + np.diff(cuts, prepend=0, append=rest)


def _deal(labels: Ints, classes: Ints, counts: Ints, rng: np.random.Generator) -> list[Ints]:
    """Random samples of each class, `counts[c, k]` to client k; positions, ascending."""
    clients: list[list[Ints]] = [[] for _ in range(counts.shape[1])]
    for label, row in zip(classes, counts, strict=True):
        members = rng.permutation(np.flatnonzero(labels == label))
        for client, part in zip(clients, np.split(members, row.cumsum()[:-1]), strict=True):
            client.append(part)
    return [np.sort(np.concatenate(parts)) for parts in clients]
