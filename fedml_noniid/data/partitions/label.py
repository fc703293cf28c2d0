"""Label skew: Dirichlet, shards of random and of equal size, similarity, classes by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.options import Count, Fraction
from fedml_noniid.data.checks import ClassName, refusal, whole_number
from fedml_noniid.data.partitions.assigning import (
    Concentration,
    assign,
    assign_classes,
    dirichlet_counts,
    drawn_until,
    joined,
    minimum_size,
)
from fedml_noniid.data.types import Ints


def dirichlet(
    labels: Ints,
    n_clients: int,
    rng: np.random.Generator,
    *,
    alpha: Concentration,
    min_size: Count = 10,
    cap: Literal["on", "off", True, False] = "on",
) -> list[Ints]:
    """Label skew: class by class, shares over the clients from Dirichlet(alpha); lower alpha, more
    skew.

    As NIID-Bench's `noniid-labeldir` (after Yurochkin et al. 2019): a client that already has an
    equal share of all samples gets nothing of the next class (`cap`; "off" leaves sizes free,
    FedNLR). All is redrawn until the smallest client has `min_size` samples. Class counts decide
    that, so attempts draw counts only, and the samples are assigned once. Raises UserError after a
    bounded number of attempts.
    """
    n = len(labels)
    min_size = minimum_size(min_size, n, n_clients)
    capped = cap in ("on", True)  # YAML 1.1 reads a bare `on` as true, YAML 1.2 as text

    classes, sizes = np.unique(labels, return_counts=True)
    draw = partial(dirichlet_counts, sizes, n_clients, alpha, capped, rng)
    draws = len(classes) * n_clients
    counts = drawn_until(draw, draws, n, n_clients, min_size, "dirichlet", f"alpha={alpha:g}")
    return assign(labels, classes, counts, rng)


def shards(
    labels: Ints, n_clients: int, rng: np.random.Generator, *, classes_per_client: Count
) -> list[Ints]:
    """Every client holds exactly `classes_per_client` classes, in unequal amounts (FedNLR; PFLlib's
    `pat`).

    The classes are divided evenly: each is assigned to floor or ceil of n_clients *
    classes_per_client / C clients. Then a class is cut among its holders at uniformly random
    points, and each holder gets at least 1/10 of the equal share. Departures: PFLlib gives
    neighbours the same classes. There each holder of a class but the last gets a random part, 1/10
    to all of the equal share, and the last holder gets the rest, the most. Here a client's number
    decides nothing.
    """
    classes, sizes = np.unique(labels, return_counts=True)
    n_classes = len(classes)
    per_client = whole_number(
        "classes_per_client", classes_per_client, 1, n_classes, " (classes in the training set)"
    )
    if n_clients * per_client < n_classes:
        allowed = (
            f"at least {-(-n_classes // n_clients)}: {n_clients} clients have to hold all "
            f"{n_classes} classes"
        )
        raise refusal("classes_per_client", per_client, allowed)

    holders, extra = divmod(n_clients * per_client, n_classes)
    if sizes.min() < holders or (sizes > holders).sum() < extra:
        few = classes[sizes.argmin()]
        raise UserError(
            f"shards: {n_clients} clients with classes_per_client={per_client} need "
            f"{holders + (extra > 0)} shards of "
            f"each class, but class {few} has {sizes.min()} samples; lower clients or "
            "classes_per_client"
        )
    quota = np.full(n_classes, holders)  # shards of each class
    quota[rng.permutation(np.flatnonzero(sizes > holders))[:extra]] += 1

    has = assign_classes(quota, n_clients, per_client, rng)  # [C, n_clients] bool
    counts = np.zeros((n_classes, n_clients), np.int64)
    for c, size in enumerate(sizes):
        counts[c, has[c]] = _random_cut(int(size), int(quota[c]), rng)
    return assign(labels, classes, counts, rng)


def shards_equal(
    labels: Ints, n_clients: int, rng: np.random.Generator, *, shards_per_client: Count = 2
) -> list[Ints]:
    """Samples are sorted by label and cut into n_clients * shards_per_client equal shards; clients
    get random shards.

    McMahan et al. 2017, section 3, with 2. All samples are assigned: shards differ by at most one
    sample. The order within a class is random. A shard may span two classes, and a client may get
    two shards of one class.
    """
    n = len(labels)
    because = f" ({n} samples over {n_clients} clients)"
    per_client = whole_number("shards_per_client", shards_per_client, 1, n // n_clients, because)
    pieces = np.array_split(_by_label(labels, rng.permutation(n)), n_clients * per_client)
    drawn = rng.permutation(len(pieces)).reshape(n_clients, per_client)
    return [np.sort(np.concatenate([pieces[i] for i in mine])) for mine in drawn]


def similarity(
    labels: Ints, n_clients: int, rng: np.random.Generator, *, s: Fraction
) -> list[Ints]:
    """The share `s` of the samples (0 to 1) is divided evenly, the rest in blocks of sorted labels
    (rFedAvg; SCAFFOLD).

    After a shuffle, the first floor(s n) samples are cut into equal parts. The others are sorted by
    label and cut into equal contiguous blocks; client 0 gets the first label. As in BUAA's
    repository, remainders are left out, at most 2 (n_clients - 1) samples.
    """
    n = len(labels)
    alike = int(s * n)
    sizes = [alike // n_clients, (n - alike) // n_clients]
    if not sum(sizes):
        raise refusal("clients", n_clients, f"fewer: with s={s:g}, {n} samples leave each none")
    order = rng.permutation(n)
    parts = order[:alike], _by_label(labels, order[alike:])
    first, rest = (
        np.split(part[: size * n_clients], n_clients)
        for part, size in zip(parts, sizes, strict=True)
    )
    return joined(first, rest)


def by_classes(
    labels: Ints,
    n_clients: int,
    rng: np.random.Generator,
    *,
    classes: list[Annotated[list[ClassName], Field(min_length=1)]],
    sizes: Literal["all", "equal"] = "all",
) -> list[Ints]:
    """Gives client k the classes `classes[k]`; each class is divided evenly among its holders.

    In CCN's figure 1, two clients share eight classes and the third has the other two. Remainders
    go to random holders. Samples of classes without a holder are left out. With `sizes: equal`,
    each client keeps as many random samples as the smallest has, so that weights by numbers of
    samples are equal.
    """
    present, supply = np.unique(labels, return_counts=True)
    has = _named_classes(classes, n_clients, present)  # [C, n_clients]
    holders = has.sum(1)
    if (supply < holders).any():
        few = int((holders - supply).argmax())
        allowed = (
            f"at most {supply[few]} clients with class {present[few]}, which has so many "
            "training samples"
        )
        raise refusal("classes", classes, allowed)

    counts = has * (supply // np.maximum(holders, 1))[:, None]
    for c, spare in enumerate(np.where(holders > 0, supply % np.maximum(holders, 1), 0)):
        counts[c, rng.permutation(np.flatnonzero(has[c]))[:spare]] += 1
    clients = assign(labels, present, counts, rng)
    if sizes == "all":
        return clients
    smallest = min(map(len, clients))
    return [np.sort(rng.permutation(mine)[:smallest]) for mine in clients]


def _named_classes(
    classes: Sequence[Sequence[int]], n_clients: int, present: Ints
) -> NDArray[np.bool_]:
    """Which client holds which class, [C, n_clients].

    UserError unless each client's classes exist and are distinct.
    """
    if len(classes) != n_clients:
        raise refusal("classes", classes, f"a list of {n_clients} lists of classes, one per client")
    has = np.array([[mine.count(label) for mine in classes] for label in present.tolist()])
    for k, mine in enumerate(classes):
        if has[:, k].sum() < len(mine) or has[:, k].max() > 1:
            because = "" if len(present) > 20 else f": {', '.join(map(str, present))}"
            raise refusal(f"classes[{k}]", mine, f"each class of the training set once{because}")
    return has > 0


def _by_label(labels: Ints, positions: Ints) -> Ints:
    """The positions sorted by label; the positions of one label keep their order."""
    return np.asarray(positions[np.argsort(labels[positions], kind="stable")])


def _random_cut(size: int, parts: int, rng: np.random.Generator) -> Ints:
    """`size` as a sum of `parts` random numbers, each at least a tenth of the equal share and at
    least 1. [parts]"""
    smallest = -(-size // (10 * parts))
    rest = size - smallest * parts
    cuts = np.sort(rng.integers(0, rest, parts - 1, endpoint=True))
    return smallest + np.diff(cuts, prepend=0, append=rest)
