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

from fedml_noniid.plugins.data.checks import known, refusal, whole_number
from fedml_noniid.plugins.data.types import Ints

KINDS = ("sudden", "incremental", "recurrent")


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
        for client, positions in enumerate(clients):
            holder[torch.from_numpy(positions)] = client
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


def check(kind: str, every: int | None, swap: Sequence[Sequence[int]]) -> None:
    """UserError for an unknown kind, a missing or useless `every`, and pairs that swap nothing."""
    known("drift.kind", kind, KINDS)
    if kind == "sudden" and every is not None:
        raise refusal(
            "drift.every", every, "incremental, recurrent drift; a sudden one has no second round"
        )
    if kind != "sudden" and every is None:
        raise refusal("drift.every", every, f"a number of rounds, which {kind} drift needs")
    pairs = (
        "a list of pairs of two classes such as [[1, 2], [3, 4]]; [] for clients that keep "
        "their labels"
    )
    if not any(swap):
        raise refusal("drift.swap", [list(pair) for pair in swap], pairs)
    for pair in swap:
        if pair and (len(pair) != 2 or pair[0] == pair[1]):
            raise refusal("drift.swap", list(pair), pairs)


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
    (`incremental`), or until the first labels come back (`recurrent`). Raises UserError for what
    `check` refuses, for a round below 1, for a class that the data lack, and for more pairs than
    clients.
    """
    check(kind, every, swap)
    whole_number("drift.at", at, 1)
    step = 0 if every is None else whole_number("drift.every", every, 1)
    if len(swap) > n_clients:
        raise refusal(
            "drift.swap", [list(pair) for pair in swap], f"at most one pair per client, {n_clients}"
        )
    concepts = np.tile(np.arange(n_classes), (1 + len(swap), 1))
    for number, pair in enumerate(swap, start=1):
        for label in pair:
            whole_number("drift.swap", label, 0, n_classes - 1, f", the {n_classes} classes")
        concepts[number, list(pair)] = list(pair)[::-1]
    group = np.arange(n_clients) % len(swap)  # [N]
    own = np.where([not pair for pair in swap], 0, np.arange(1, 1 + len(swap)))[
        group
    ]  # [N], after the drift
    begins = at + step * group if kind == "incremental" else np.full(n_clients, at)
    ends = at + step if kind == "recurrent" else np.inf
    rounds = sorted({*begins.tolist(), *([ends] if kind == "recurrent" else [])})
    drifted = [own * (begins <= t) * (t < ends) for t in rounds]
    return Drift(concepts, np.array(rounds, np.int64), np.stack(drifted))
