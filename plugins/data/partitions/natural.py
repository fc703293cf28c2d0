"""Natural skew: a client has the samples of one user, or of a group of users."""

from __future__ import annotations

import numpy as np

from fedml_noniid.plugins.core.options import Count
from fedml_noniid.plugins.data.checks import refusal, whole_number
from fedml_noniid.plugins.data.partitions.assigning import by_client
from fedml_noniid.plugins.data.types import Ints


def natural(
    owners: Ints, n_clients: int, rng: np.random.Generator, *, min_samples: Count = 1
) -> list[Ints]:
    """Every client is one user, drawn at random among those with `min_samples` samples; the others
    are left out.

    rFedAvg's 100 or 500 sampled writers of FEMNIST and 500 users of Sent140.
    """
    return natural_grouped(owners, n_clients, rng, users=n_clients, min_samples=min_samples)


def natural_grouped(
    owners: Ints,
    n_clients: int,
    rng: np.random.Generator,
    *,
    users: Count | None = None,
    min_samples: Count = 1,
) -> list[Ints]:
    """Divides `users` users with `min_samples` samples, by default all, evenly into random groups.

    A client holds the samples of its group; the numbers of users differ by at most one. CCN's
    FEMNIST writers in 10 or 20 clients; rFedAvg's 500 users, 25 per silo. The other users are left
    out.
    """
    if len(owners) == 0:
        raise refusal("clients", n_clients, "none (0 training samples)")
    # The users who own a sample, numbered from 0.
    user, sizes = np.unique(owners, return_inverse=True, return_counts=True)[1:]
    because = " (training samples of the largest user)"
    least = whole_number("min_samples", min_samples, 1, int(sizes.max()), because)
    eligible = np.flatnonzero(sizes >= least)
    most = len(eligible)
    because = f"{most} users with at least {least} training samples"
    whole_number("clients", n_clients, 1, most, f" ({because})")
    if users is not None:
        because = f" ({n_clients} clients, {because})"
        users = whole_number("users", users, n_clients, most, because)
    client = np.full(len(sizes), -1)
    for k, group in enumerate(np.array_split(rng.permutation(eligible)[:users], n_clients)):
        client[group] = k
    return by_client(client[user], n_clients)
