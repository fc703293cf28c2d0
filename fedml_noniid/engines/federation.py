"""Describes the data of a run: the clients' samples, absences, and the tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedml_noniid.core.algorithm import Algorithm
from fedml_noniid.core.component import Public
from fedml_noniid.core.data import Samples
from fedml_noniid.data.drift import Drift, SampleDrift
from fedml_noniid.data.ragged import ByClient, Ragged, lists_of
from fedml_noniid.data.types import Ints
from fedml_noniid.engines.absences import Absent, nobody
from fedml_noniid.engines.attackers import Attackers


@dataclass(frozen=True, eq=False)
class Federation:
    """N clients and a server. Everything lies on the device of `train`.

    A process of a deployment knows a part: the server has the tests, a silo its own client and
    samples.
    """

    size: int  # N
    train: Samples
    clients: Mapping[int, Ints]  # positions in `train` by client id, ascending
    test: Samples
    validation: Samples | None = None
    public: Samples | None = None  # training samples that no client holds
    # which clients do not answer; they compute nothing, and their memory stays as it is
    absent: Absent = nobody
    attackers: Attackers | None = None  # who lies in updates; what lies in samples is in `train`
    # how the labels of the clients and of the tests change with the round
    drift: Drift | None = None
    # Each client's own test samples, as it sees them before any drift. They count where clients
    # keep a part of the model to themselves. None: the whole test set for each.
    tests: Callable[[], Sequence[Samples]] | None = None
    held: SampleDrift | None = None  # the drift of `train`
    # Positions in `test` of each client's own test samples, by the client's name. A tested round
    # then has the accuracy of each client.
    test_clients: Mapping[str, Ints] | None = None

    @staticmethod
    def from_indices(
        train: Samples, clients: Sequence[Ints], test: Samples, **more: object
    ) -> Federation:
        """All clients in one process, numbered from 0; `more`: the other fields."""
        by_client = ByClient(Ragged.from_lists(clients))
        whole = Federation(
            *(len(clients), train, by_client, test),
            **more,  # type: ignore[arg-type]  # the caller's fields have types of their own
        )
        return replace(
            whole,
            held=None if whole.drift is None else whole.drift.per_sample(clients, len(train.y)),
        )

    @staticmethod
    def of_server(size: int, test: Samples, **more: object) -> Federation:
        """What the server of a deployment has; `more`: the other fields."""
        nothing = Samples(test.x[:0], test.y[:0])
        return Federation(size, nothing, {}, test, **more)  # type: ignore[arg-type]  # likewise

    @property
    def n_public(self) -> int:
        """Samples of the public split."""
        return 0 if self.public is None else len(self.public.y)

    def used_by(self, algorithm: Algorithm) -> Federation:
        """As the algorithm uses it: its public split, which it may give to each client; one client
        if it pools."""
        used = self
        if algorithm.needs.public is Public.TEST_SET:
            used = replace(used, public=used.test)
        if algorithm.needs.pooled:
            # There is no client then that could be missing, or send a lie.
            whole = {0: lists_of(used.clients).flat}
            used = replace(used, size=1, clients=whole, absent=nobody, attackers=None)
        shared = round(algorithm.needs.shared * used.n_public)
        return used.with_public(shared) if shared else used

    def with_public(self, n: int) -> Federation:
        """With `n` public samples in the hands of each client, evenly spaced in the split.

        A data set may be sorted by class, so the first `n` might lack some. They stay clean: they
        belong to the server, and they are the same for every client.
        """
        train, public = self.train, self.public
        assert public is not None, "there are some"
        noise = train.noise
        if noise is not None:
            clean = noise.row.new_full((n,), len(noise.std) - 1)
            noise = noise._replace(row=torch.cat([noise.row, clean]))
        rows = torch.arange(n) * len(public.y) // n
        joined = Samples(
            torch.cat([train.x, public.x[rows]]), torch.cat([train.y, public.y[rows]]), noise
        )
        added = np.arange(len(train.y), len(joined.y))
        if (held := self.held) is not None:
            nobody_s = held.holder.new_full((n,), held.drift.clients.shape[1])
            held = held._replace(holder=torch.cat([held.holder, nobody_s]))
        clients = {
            client: np.concatenate([positions, added]) for client, positions in self.clients.items()
        }
        return replace(self, train=joined, clients=clients, held=held)
