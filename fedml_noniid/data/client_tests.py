"""The test set, split over the clients like the training set: each client is tested on its own kind
of samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fedml_noniid.data.dataset import Dataset
from fedml_noniid.data.partitions import goes_by_owner
from fedml_noniid.data.partitions.assigning import by_client
from fedml_noniid.data.ragged import Ragged
from fedml_noniid.data.statistics import class_counts
from fedml_noniid.data.streams import stream
from fedml_noniid.data.types import Ints


def client_tests(data: Dataset, clients: Sequence[Ints], kind: str, seed: int) -> Ragged:
    """Each client's positions in the test set, for a partition of this `kind`: those of its users,
    or alike.

    They are of the client's users if the data name the users, the partition goes by them, and no
    user is in two clients.
    """
    owned = of_users(data, clients, kind, data.test_owner)
    if owned is not None:
        return owned
    names, train, test = data.strata
    counts = class_counts(train, clients, len(names))
    return in_proportion(counts, test, stream(seed, "test clients"))


def of_users(
    data: Dataset, clients: Sequence[Ints], kind: str, owners: Tensor | None
) -> Ragged | None:
    """Each client's positions among samples with these `owners` [m]: those of its users.

    None unless the data name the users, the partition goes by them, and no user is in two clients.
    """
    if data.train_owner is None or owners is None or not goes_by_owner(kind):
        return None
    return of_owners(Ragged.from_lists(clients), data.train_owner.numpy(), owners.numpy())


def of_owners(clients: Ragged, train_owners: Ints, owners: Ints) -> Ragged | None:
    """The positions of each client's own users among samples with `owners` [m], ascending.

    `clients` are positions in the training set, with `train_owners` [n]. None if a user is in two
    clients.
    """
    client = np.full(1 + max(int(train_owners.max()), int(owners.max(initial=0))), -1)
    user = train_owners[clients.flat]
    client[user] = clients.holder
    is_apart = (client[user] == clients.holder).all()
    return by_client(client[owners], len(clients)) if is_apart else None


def in_proportion(counts: Ints, test_labels: Ints, rng: np.random.Generator) -> Ragged:
    """The test samples of each class, assigned in proportion to the training samples of that class;
    positions, ascending.

    `counts` [N, C] are the clients' training samples by class, `test_labels` is [m]. Counts are
    rounded by largest remainders, ties at random. No sample is given to two clients. A class is
    assigned completely if some client holds it, and not at all otherwise. A client can get no
    sample. rFedAvg's Fig. 11; BUAA's repository splits its test set as it splits the training set,
    which for sorted blocks is the same up to rounding.
    """
    n_clients, n_classes = counts.shape
    client = np.full(len(test_labels), -1)
    for c in range(n_classes):
        members, of_class = rng.permutation(np.flatnonzero(test_labels == c)), counts[:, c]
        if of_class.any():
            client[members] = np.repeat(
                np.arange(n_clients), _proportional(of_class, len(members), rng)
            )
    return by_client(client, n_clients)


def _proportional(weights: Ints, total: int, rng: np.random.Generator) -> Ints:
    """`total` in proportion to `weights`, rounded by largest remainders, ties at random.

    [N] -> [N]
    """
    exact, whole = weights * total, weights.sum()
    shares = exact // whole
    by_remainder = np.lexsort((rng.random(len(weights)), -(exact % whole)))
    shares[by_remainder[: total - shares.sum()]] += 1
    return np.asarray(shares)
