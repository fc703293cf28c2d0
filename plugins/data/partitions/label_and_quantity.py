"""Label and quantity skew at once: two classes for each client, in sizes by a law or by Dirichlet cuts."""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from plugins.core.errors import UserError
from plugins.data.checks import refusal, whole_number
from plugins.data.partitions.dealing import (
    client_count,
    concentration,
    deal,
    deal_classes,
    dirichlet_counts,
    drawn_until,
    least,
)
from plugins.data.partitions.quantity import exact_sizes, size_law
from plugins.data.types import Floats, Ints

# Draws of who holds which classes before giving up.
MAX_PAIRINGS = 100


def two_classes(
    labels: Ints,
    n_clients: int,
    rng: np.random.Generator,
    *,
    sizes: Literal["balanced", "power_law", "lognormal"] = "balanced",
    total: int | None = None,
    min_size: int = 10,
    exponent: float | None = None,
    sigma: float | None = None,
) -> list[Ints]:
    """Every client holds 2 distinct classes, every class lies with 2 n_clients / C clients (FedNNNN's non-IID).

    The paper names neither the pairs nor the law of its unbalanced sizes. Sizes: equal (`balanced`, to within one),
    or as in `iid_unbalanced` for `power_law` and `lognormal`; they are kept exactly and add up to `total`, by
    default to all samples. A class has only so many: where half of each client's size is more than its classes
    have, the client gets more of its other class, at least one of each. What no split can give is refused, as in
    MNIST with 100 clients: the power law's first would hold 28% of all samples, two classes are 20%. A lower
    `total` then leaves the samples beyond it out. Pairs are redrawn a bounded number of times where they decide it.
    """
    n = len(labels)
    n_clients = client_count(n_clients, n)
    classes, supply = np.unique(labels, return_counts=True)
    holders = _holders(n_clients, len(classes))
    law = size_law(sizes, exponent, sigma, ("balanced", "power_law", "lognormal"))
    # Each client has to hold one sample of each of its classes.
    wanted = n if total is None else whole_number("total", total, 2 * n_clients, n, f" ({n} training samples)")
    min_size = least(min_size, wanted, n_clients, low=2)
    if supply.min() < holders:
        raise UserError(
            f"two_classes: {n_clients} clients need {holders} samples of each class, but class "
            f"{classes[supply.argmin()]} has {supply.min()}; lower clients"
        )
    # For one client, as its classes' other clients need a sample each. Never less than the equal share.
    most = int(np.sort(supply)[-2:].sum()) - 2 * (holders - 1)
    if sizes != "lognormal":  # whose sizes have to be drawn
        weights, lowest = law(n_clients, rng), n_clients * min_size
        largest = partial(_largest, weights, min_size)
        if largest(wanted) > most:
            allowed = lowest + bisect_right(range(lowest, wanted), most, key=largest) - 1
            because = (
                f"; beyond it one client with sizes={sizes} needs more than the {most} that two classes have for it"
            )
            raise refusal("total", wanted, f"{lowest} to {allowed}{because}")

    for _ in range(MAX_PAIRINGS):
        counts = _split(
            exact_sizes(law(n_clients, rng), wanted, min_size),
            deal_classes(np.full(len(classes), holders), n_clients, 2, rng),
            supply,
        )
        if counts is not None:
            return deal(labels, classes, counts, rng)
    raise UserError(
        f"two_classes: {MAX_PAIRINGS} pairings of classes gave no partition of total={wanted} samples over {n_clients} "
        f"clients with sizes={sizes}: a class runs out; lower total"
    )


def mixed(
    labels: Ints, n_clients: int, rng: np.random.Generator, *, beta: float = 0.5, min_size: int = 10
) -> list[Ints]:
    """Client k holds class k and one more, every class lies with 2 clients, cut by Dirichlet(beta, beta).

    NIID-Bench's `mixed`, FNR-FL's label and quantity skew with 0.5; there are as many clients as classes. Departures:
    the second classes are a uniformly random permutation without fixed points, where NIID-Bench draws them one
    by one and can get stuck in an endless loop; and the cuts are redrawn until the smallest client has `min_size`
    samples, where NIID-Bench asks that of shares it then doesn't use. Where a cut rounds to nothing, a client holds
    one class only. Raises UserError after a bounded number of attempts.
    """
    n = len(labels)
    n_clients = client_count(n_clients, n)
    classes, supply = np.unique(labels, return_counts=True)
    if n_clients != len(classes) or n_clients < 2:
        allowed = f"{len(classes)}, one per class" if len(classes) > 1 else "none: mixed needs 2 classes or more"
        raise refusal("clients", n_clients, allowed)
    beta = concentration("beta", beta)
    min_size = least(min_size, n, n_clients)
    failure = (
        f"mixed: {{attempts}} attempts gave no partition of {n} samples over {n_clients} clients with "
        f"beta={beta:g} and at least min_size={min_size} samples each; raise beta or lower min_size"
    )
    first = np.arange(n_clients)
    second = _without_fixed_points(n_clients, rng)  # the other client of class c

    def draw(attempts: int) -> Ints:
        cut = dirichlet_counts(supply, 2, beta, False, rng, attempts)  # [A, C, 2]
        counts = np.zeros((attempts, n_clients, n_clients), np.int64)
        counts[:, first, first], counts[:, first, second] = cut[:, :, 0], cut[:, :, 1]
        return counts

    return deal(labels, classes, drawn_until(draw, n_clients**2, min_size, failure), rng)


def _holders(n_clients: int, n_classes: int) -> int:
    """How many clients hold each class. UserError if that isn't a whole number."""
    if n_classes < 2:
        raise refusal("clients", n_clients, "none: two_classes needs 2 classes or more")
    if 2 * n_clients % n_classes:
        step = n_classes // math.gcd(n_classes, 2)
        raise refusal("clients", n_clients, f"multiples of {step}: 2 classes each, all {n_classes} equally often")
    return 2 * n_clients // n_classes


def _largest(weights: Floats, min_size: int, total: int) -> int:
    return int(exact_sizes(weights, total, min_size).max())


def _split(sizes: Ints, held: NDArray[np.bool_], supply: Ints) -> Ints | None:
    """How many samples of each of its two classes a client gets, or None if the classes don't have them. [C, N]

    Rows add up to at most `supply` [C], columns to `sizes` [N], and what is `held` [C, N] is at least 1. Halves,
    scaled in turn to what the classes have and to the sizes; whole numbers are then moved to come out exactly.
    """
    share = held * (sizes / 2)
    for _ in range(100):
        share *= np.minimum(1, supply / share.sum(1))[:, None]
        share *= sizes / share.sum(0)
    a, b = np.nonzero(held.T)[1].reshape(-1, 2).T  # the two classes of each client
    client = np.arange(len(sizes))
    counts = np.zeros(held.shape, np.int64)
    counts[a, client] = np.clip(np.rint(share[a, client]), 1, sizes - 1)
    counts[b, client] = sizes - counts[a, client]
    while (counts.sum(1) > supply).any():
        path = _relief(counts, a, b, supply)
        if path is None:
            return None
        over = counts.sum(1) - supply
        amount = int(min(over[path[0]], -over[path[-1]]))
        for x, y in pairwise(path):
            amount = min(amount, int((counts[x, _both(a, b, x, y)] - 1).sum()))
        for x, y in pairwise(path):
            _move(counts, _both(a, b, x, y), x, y, amount)
    return counts


def _relief(counts: Ints, a: Ints, b: Ints, supply: Ints) -> list[int] | None:
    """The shortest way from a class with too much to one with too little, each step through clients with both."""
    n_classes, client = len(supply), np.arange(counts.shape[1])
    room = np.zeros((n_classes, n_classes), np.int64)
    np.add.at(room, (a, b), counts[a, client] - 1)
    np.add.at(room, (b, a), counts[b, client] - 1)
    over = counts.sum(1) - supply
    paths = [[int(c)] for c in np.flatnonzero(over > 0)]
    seen = over > 0
    for path in paths:  # grows
        if over[path[-1]] < 0:
            return path
        for c in np.flatnonzero((room[path[-1]] > 0) & ~seen):
            seen[c] = True
            paths.append([*path, int(c)])
    return None


def _both(a: Ints, b: Ints, x: int, y: int) -> Ints:
    """The clients that hold classes x and y."""
    return np.flatnonzero(((a == x) & (b == y)) | ((a == y) & (b == x)))


def _move(counts: Ints, clients: Ints, x: int, y: int, amount: int) -> None:
    """Turns `amount` samples of class x into class y, first where there are most; in place."""
    for k in clients[np.argsort(-counts[x, clients], kind="stable")]:
        some = min(amount, int(counts[x, k]) - 1)
        counts[x, k] -= some
        counts[y, k] += some
        amount -= some


def _without_fixed_points(n: int, rng: np.random.Generator) -> Ints:
    """A uniformly random permutation of n >= 2 that leaves nothing in its place; one in e of all is such. [n]"""
    for _ in range(MAX_PAIRINGS):
        order = rng.permutation(n)
        if (order != np.arange(n)).all():
            return order
    raise UserError(f"mixed: {MAX_PAIRINGS} permutations of {n} classes all left one in its place; try another seed")
