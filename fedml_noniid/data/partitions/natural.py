"""Natural skew: a client has the samples of one user, or of a group of users."""

from __future__ import annotations

import numpy as np

from fedml_noniid.core.options import Count
from fedml_noniid.data.checks import whole_number
from fedml_noniid.data.partitions.assigning import by_client
from fedml_noniid.data.ragged import Ragged
from fedml_noniid.data.types import Ints


def natural(owners: Ints, n_clients: int, rng: np.random.Generator) -> Ragged:
    """Every client is one user, drawn at random; the others are left out.

    rFedAvg's 100 or 500 sampled writers of FEMNIST and 500 users of Sent140.
    """
    return natural_grouped(owners, n_clients, rng, users=n_clients)


def natural_grouped(
    owners: Ints, n_clients: int, rng: np.random.Generator, *, users: Count | None = None
) -> Ragged:
    """Divides `users` users, drawn at random, by default all, evenly into random groups.

    A client holds the samples of its group; the numbers of users differ by at most one. CCN's
    FEMNIST writers in 10 or 20 clients; rFedAvg's 500 users, 25 per silo. The other users are left
    out.
    """
    names, user = np.unique(owners, return_inverse=True)
    because = f"{len(names)} users with training samples"
    whole_number("clients", n_clients, 1, len(names), f" ({because})")
    if users is not None:
        whole_number("users", users, n_clients, len(names), f" ({n_clients} clients, {because})")
    client = np.full(len(names), -1)
    drawn = rng.permutation(len(names))[:users]
    # As np.array_split: the first groups have one user more.
    least, more = divmod(len(drawn), n_clients)
    sizes = np.where(np.arange(n_clients) < more, least + 1, least)
    client[drawn] = np.repeat(np.arange(n_clients), sizes)
    return by_client(client[user], n_clients)
