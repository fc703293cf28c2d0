"""Label and quantity skew at once: two classes for each client, in sizes by a law or by Dirichlet
cuts."""

from __future__ import annotations

import math
from bisect import bisect_right
from functools import partial
from itertools import pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import Count
from fedml_noniid.data.checks import refusal, whole_number
from fedml_noniid.data.partitions.assigning import (
    Concentration,
    Exponent,
    assign,
    assign_classes,
    dirichlet_counts,
    drawn_until,
    minimum_size,
)
from fedml_noniid.data.partitions.quantity import exact_sizes, relative_sizes
from fedml_noniid.data.types import Ints

# Draws of who holds which classes before giving up.
MAX_PAIRINGS = 100


def two_classes(
    labels: Ints,
    n_clients: int,
    rng: np.random.Generator,
    *,
    sizes: Literal["balanced", "power_law", "lognormal"] = "balanced",
    total: Count | None = None,
    min_size: Count = 10,
    exponent: Exponent | None = None,
) -> list[Ints]:
    """Every client holds 2 distinct classes, every class lies with 2 n_clients / C clients
    (FedNNNN's non-IID).

    The paper names neither the pairs nor the law of its unbalanced sizes. Sizes are equal to within
    one (`balanced`), or as in `iid_unbalanced` (`power_law`, `lognormal`). They are kept exactly
    and add up to `total`, by default all samples. A client gets half of its size from each class.
    If a class has too few samples, the client gets more of its other class, and at least one sample
    of each. Sizes that no split can give are refused: on MNIST with 100 clients, the power law's
    first client would hold 28% of all samples, and two classes are 20%. A lower `total` then leaves
    the samples beyond it out. If the pairs are the reason, they are redrawn, a bounded number of
    times.
    """
    n = len(labels)
    classes, supply = np.unique(labels, return_counts=True)
    if len(classes) < 2:
        raise refusal("clients", n_clients, "none: two_classes needs 2 classes or more")
    holders, uneven = divmod(2 * n_clients, len(classes))
    if uneven:
        step = len(classes) // math.gcd(len(classes), 2)
        often = f"2 classes each, all {len(classes)} equally often"
        raise refusal("clients", n_clients, f"multiples of {step}: {often}")
    law = partial(relative_sizes, sizes, n_clients, rng, exponent)
    # Each client has to hold one sample of each of its classes.
    wanted = (
        n
        if total is None
        else whole_number("total", total, 2 * n_clients, n, f" ({n} training samples)")
    )
    min_size = minimum_size(min_size, wanted, n_clients, low=2)
    if supply.min() < holders:
        raise UserError(
            f"two_classes: {n_clients} clients need {holders} samples of each class, but class "
            f"{classes[supply.argmin()]} has {supply.min()}; lower clients"
        )
    # What two classes have for one client: each of their other clients needs a sample. At least the
    # equal share.
    most = int(np.sort(supply)[-2:].sum()) - 2 * (holders - 1)
    if sizes != "lognormal":  # whose sizes are known only once they are drawn
        weights, lowest = law(), n_clients * min_size

        def largest(total: int) -> int:
            return int(exact_sizes(weights, total, min_size).max())

        if largest(wanted) > most:
            allowed = lowest + bisect_right(range(lowest, wanted), most, key=largest) - 1
            because = (
                f"one client with sizes={sizes} needs more than the {most} that two "
                "classes have for it"
            )
            raise refusal("total", wanted, f"{lowest} to {allowed}; beyond it {because}")

    for _ in range(MAX_PAIRINGS):
        counts = _split(
            exact_sizes(law(), wanted, min_size),
            assign_classes(np.full(len(classes), holders), n_clients, 2, rng),
            supply,
        )
        if counts is not None:
            return assign(labels, classes, counts, rng)
    raise UserError(
        f"two_classes: {MAX_PAIRINGS} pairings of classes gave no partition of total={wanted} "
        f"samples over {n_clients} "
        f"clients with sizes={sizes}: a class runs out; lower total"
    )


def mixed(
    labels: Ints,
    n_clients: int,
    rng: np.random.Generator,
    *,
    beta: Concentration = 0.5,
    min_size: Count = 10,
) -> list[Ints]:
    """Client k holds class k and one more, every class lies with 2 clients, cut by Dirichlet(beta,
    beta).

    NIID-Bench's `mixed`; with 0.5, FNR-FL's label and quantity skew. There are as many clients as
    classes. Departures: NIID-Bench draws the second classes one by one and can get stuck in an
    endless loop; here they are a uniformly random permutation without fixed points. NIID-Bench
    checks the smallest size on shares that it then doesn't use; here the cuts are redrawn until the
    smallest client has `min_size` samples. If a cut rounds to nothing, a client holds one class
    only. Raises UserError after a bounded number of attempts.
    """
    n = len(labels)
    classes, supply = np.unique(labels, return_counts=True)
    if n_clients != len(classes) or n_clients < 2:
        allowed = (
            f"{len(classes)}, one per class"
            if len(classes) > 1
            else "none: mixed needs 2 classes or more"
        )
        raise refusal("clients", n_clients, allowed)
    min_size = minimum_size(min_size, n, n_clients)
    first = np.arange(n_clients)
    second = rng.permutation(n_clients)  # the other client of class c
    while (second == first).any():  # one in e permutations leaves nothing in its place
        second = rng.permutation(n_clients)

    def draw(attempts: int) -> Ints:
        cut = dirichlet_counts(supply, 2, beta, False, rng, attempts)  # [A, C, 2]
        counts = np.zeros((attempts, n_clients, n_clients), np.int64)
        counts[:, first, first], counts[:, first, second] = cut[:, :, 0], cut[:, :, 1]
        return counts

    counts = drawn_until(draw, n_clients**2, n, n_clients, min_size, "mixed", f"beta={beta:g}")
    return assign(labels, classes, counts, rng)


def _split(sizes: Ints, has: NDArray[np.bool_], supply: Ints) -> Ints | None:
    """How many samples each client gets of its two classes, [C, N]; None if the classes have too
    few.

    Rows add up to at most `supply` [C], columns to `sizes` [N]; where `has` [C, N], the count is
    at least 1. The start is half and half. It is scaled in turn to what the classes have and to the
    sizes, then rounded. At last samples move between classes until no class gives more than it has.
    """
    share = has * (sizes / 2)
    for _ in range(100):
        share *= np.minimum(1, supply / share.sum(1))[:, None]
        share *= sizes / share.sum(0)
    a, b = np.nonzero(has.T)[1].reshape(-1, 2).T  # the two classes of each client
    client = np.arange(len(sizes))
    counts = np.zeros(has.shape, np.int64)
    counts[a, client] = np.clip(np.rint(share[a, client]), 1, sizes - 1)
    counts[b, client] = sizes - counts[a, client]
    while ((over := counts.sum(1) - supply) > 0).any():
        # [C, C]: how many samples of one class the clients that hold both can turn into the other
        room = np.asarray(np.where(has, counts - 1, 0) @ has.T, np.int64)
        path = _relief(over, room)
        if path is None:
            return None
        steps = list(pairwise(path))
        amount = int(min(over[path[0]], -over[path[-1]], *(room[x, y] for x, y in steps)))
        for x, y in steps:
            _move(counts, np.flatnonzero(has[x] & has[y]), x, y, amount)
    return counts


def _relief(over: Ints, room: Ints) -> list[int] | None:
    """The shortest path from a class with too much to a class with too little; each step has `room`
    [C, C]."""
    paths = [[int(c)] for c in np.flatnonzero(over > 0)]
    reached = over > 0
    for path in paths:  # grows
        if over[path[-1]] < 0:
            return path
        for c in np.flatnonzero((room[path[-1]] > 0) & ~reached):
            reached[c] = True
            paths.append([*path, int(c)])
    return None


def _move(counts: Ints, clients: Ints, x: int, y: int, amount: int) -> None:
    """Turns `amount` samples of class x into class y, in place; first of the client that has most
    of x."""
    for k in clients[np.argsort(-counts[x, clients], kind="stable")]:
        some = min(amount, int(counts[x, k]) - 1)
        counts[x, k] -= some
        counts[y, k] += some
        amount -= some
