"""Concept drift: from some round on, clients swap the labels of two classes, so P(y|x) changes and
P(x) does not.

Chen et al., Classifier Clustering and Feature Alignment for Federated Learning under Distributed
Concept Drift (FedCCFA), NeurIPS 2024, https://arxiv.org/abs/2410.18478: each group of clients swaps
a pair of classes of its own. `sudden`: all groups in one round. `incremental`: one group after the
other. `recurrent`: all groups in one round, and the first labels come back later. Jothimurugesan et
al., Federated Learning under Distributed Concept Drift (FedDrift), AISTATS 2023,
https://arxiv.org/abs/2206.00799, swap pairs on MNIST too, at different times for different clients.
Departure: FedCCFA has three groups with 30, 30 and 40 % of the clients. Here client i belongs to
group i modulo their number.

A model is tested as in FedCCFA: on the whole test set with a client's labels of that round, as the
mean over clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedml_noniid.core.errors import UserError
from fedml_noniid.data.ragged import Ragged
from fedml_noniid.data.types import Ints


@dataclass(frozen=True, eq=False)
class Drift:
    """The labels that clients give to the classes, by round.

    A concept is a permutation of the classes.
    """

    concepts: Ints  # [K, C], the label of each class; concept 0 has the true ones
    rounds: Ints  # [R] ascending, from 1; before the first of them, every client has concept 0
    clients: Ints  # [R, N], the concept of each client from that round on

    def concept(self, round_: int) -> Ints:
        """The concept of each client in a round, [N]; round 0 is before the first."""
        row = int(np.searchsorted(self.rounds, round_, side="right")) - 1
        return self.clients[row] if row >= 0 else np.zeros_like(self.clients[0])

    def only(self, client: int) -> Drift:
        """The drift of one client."""
        return Drift(self.concepts, self.rounds, self.clients[:, client : client + 1])

    def labels(self, y: Tensor, client: int, round_: int) -> Tensor:
        """The labels that a client gives in a round to samples of the classes `y` [n]."""
        return self._relabelled(y, int(self.concept(round_)[client]))

    def views(self, y: Tensor, round_: int) -> list[tuple[float, Tensor]]:
        """(share of the clients, labels [n]): how the clients label samples of the classes `y` [n]
        in a round."""
        concepts, counts = np.unique(self.concept(round_), return_counts=True)
        shares = counts / counts.sum()
        return [
            (float(share), self._relabelled(y, int(k)))
            for share, k in zip(shares, concepts, strict=True)
        ]

    def first(self) -> list[int]:
        """The first round in which a client's labels are not the true ones, [N]; 0 if there is
        none."""
        drifted = self.clients != 0
        begins: list[int] = np.where(drifted.any(0), self.rounds[drifted.argmax(0)], 0).tolist()
        return begins

    def per_sample(self, clients: Sequence[Ints], n: int) -> SampleDrift:
        """The drift of `n` training samples, of which `clients` hold the positions.

        Nobody else's samples drift.
        """
        holder = torch.full((n,), len(clients))
        lists = Ragged.from_lists(clients)
        holder[torch.from_numpy(lists.flat)] = torch.from_numpy(lists.holder)
        return SampleDrift(self, holder)

    def _relabelled(self, y: Tensor, concept: int) -> Tensor:
        return torch.from_numpy(self.concepts[concept]).to(y.device)[y]


class SampleDrift(NamedTuple):
    """The drift of a training set."""

    drift: Drift
    holder: Tensor  # [n] int64, the client that holds a sample; N for nobody

    def labels(self, y: Tensor, round_: int) -> Tensor:
        """The labels [n] in a round of samples whose first labels are `y` [n]."""
        concept = torch.from_numpy(np.append(self.drift.concept(round_), 0))[self.holder].to(
            y.device
        )
        return torch.from_numpy(self.drift.concepts).to(y.device)[concept, y]


def drift(
    kind: str,
    at: int,
    every: int | None,
    swap: Sequence[Sequence[int]],
    n_clients: int,
    n_classes: int,
) -> Drift:
    """The drift of `n_clients` clients.

    Client i swaps the pair number i modulo their number; an empty one keeps all.

    `at` is the round in which it begins, from 1. `every`, in rounds: from one group to the next
    (`incremental`), or until the first labels come back (`recurrent`). `swap` has the numbers of
    classes. Raises UserError for more pairs than clients.
    """
    step = every or 0
    if len(swap) > n_clients:
        raise UserError(
            path=("drift", "swap"),
            value=swap,
            allowed=f"at most one pair per client, {n_clients}",
        )
    concepts = np.tile(np.arange(n_classes), (1 + len(swap), 1))
    for number, pair in enumerate(swap, start=1):
        concepts[number, list(pair)] = list(pair)[::-1]
    group = np.arange(n_clients) % len(swap)  # [N]
    after = np.where([not pair for pair in swap], 0, np.arange(1, 1 + len(swap)))[
        group
    ]  # [N], after the drift
    begins = at + step * group if kind == "incremental" else np.full(n_clients, at)
    ends = at + step if kind == "recurrent" else np.inf
    rounds = sorted({*begins.tolist(), *([ends] if kind == "recurrent" else [])})
    drifted = [after * (begins <= t) * (t < ends) for t in rounds]
    return Drift(concepts, np.array(rounds, np.int64), np.stack(drifted))
