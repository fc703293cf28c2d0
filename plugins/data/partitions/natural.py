"""Natural skew: a client has the samples of one user, or of a group of users."""

from __future__ import annotations

import numpy as np

from fedml_noniid.plugins.data.checks import refusal, whole_number
from fedml_noniid.plugins.data.partitions.assigning import by_client
from fedml_noniid.plugins.data.types import Ints


def natural(
    owners: Ints, n_clients: int, rng: np.random.Generator, *, min_samples: int = 1
) -> list[Ints]:
    """Every client is one user, drawn at random among those with `min_samples` samples; the others
    are left out.

    rFedAvg's 100 or 500 sampled writers of FEMNIST and 500 users of Sent140.
    """
    eligible, user = _users(owners, n_clients, min_samples)
    client = np.full(user.max() + 1, -1)
    client[rng.permutation(eligible)[:n_clients]] = np.arange(n_clients)
    return by_client(client[user], n_clients)


def natural_grouped(
    owners: Ints,
    n_clients: int,
    rng: np.random.Generator,
    *,
    users: int | None = None,
    min_samples: int = 1,
) -> list[Ints]:
    """Divides `users` users with `min_samples` samples, by default all, evenly into random groups.

    A client holds the samples of its group; the numbers of users differ by at most one. CCN's
    FEMNIST writers in 10 or 20 clients; rFedAvg's 500 users, 25 per silo. The other users are left
    out.
    """
    eligible, user = _users(owners, n_clients, min_samples)
    most, because = (
        len(eligible),
        f" ({n_clients} clients, {_eligible(len(eligible), min_samples)})",
    )
    wanted = most if users is None else whole_number("users", users, n_clients, most, because)
    client = np.full(user.max() + 1, -1)
    for k, group in enumerate(np.array_split(rng.permutation(eligible)[:wanted], n_clients)):
        client[group] = k
    return by_client(client[user], n_clients)


def _users(owners: Ints, n_clients: object, min_samples: object) -> tuple[Ints, Ints]:
    """The eligible users, ascending, and each sample's user.

    Users who own a sample are numbered from 0.

    UserError if there are fewer eligible users than clients.
    """
    if len(owners) == 0:
        raise refusal("clients", n_clients, "none (0 training samples)")
    user, held = np.unique(owners, return_inverse=True, return_counts=True)[1:]
    least = whole_number(
        "min_samples", min_samples, 1, int(held.max()), " (training samples of the largest user)"
    )
    eligible = np.flatnonzero(held >= least)
    whole_number("clients", n_clients, 1, len(eligible), f" ({_eligible(len(eligible), least)})")
    return eligible, user


def _eligible(n_users: int, min_samples: int) -> str:
    return f"{n_users} users with at least {min_samples} training samples"
