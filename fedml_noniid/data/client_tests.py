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
    trained, others, lists = data.train_owner.numpy(), owners.numpy(), Ragged.from_lists(clients)
    client = _of_users(lists, trained, int(others.max(initial=0)))
    is_apart = (client[trained[lists.flat]] == lists.holder).all()  # no user is in two clients
    return of_owners(lists, trained, others) if is_apart else None


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


def of_owners(clients: Sequence[Ints], train_owners: Ints, test_owners: Ints) -> Ragged:
    """The test samples of each client's own users; positions, ascending.

    `clients` are positions in the training set; no user is in two clients. The owners are [n] and
    [m].
    """
    client = _of_users(Ragged.from_lists(clients), train_owners, int(test_owners.max(initial=0)))
    return by_client(client[test_owners], len(clients))


def _of_users(clients: Ragged, owners: Ints, last: int) -> Ints:
    """A client of each user; -1 for users without one. There are users up to number `last`."""
    client = np.full(1 + max(int(owners.max()), last), -1)
    client[owners[clients.flat]] = clients.holder
    return client


def _proportional(weights: Ints, total: int, rng: np.random.Generator) -> Ints:
    """`total` in proportion to `weights`, rounded by largest remainders, ties at random.

    [N] -> [N]
    """
    exact, whole = weights * total, weights.sum()
    shares = exact // whole
    by_remainder = np.lexsort((rng.random(len(weights)), -(exact % whole)))
    shares[by_remainder[: total - shares.sum()]] += 1
    return np.asarray(shares)
