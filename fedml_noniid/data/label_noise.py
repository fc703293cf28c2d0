"""Label noise: some labels of a client's training samples are wrong, the same ones in every round.

The kinds are the transition matrices of Han et al., Co-teaching: Robust Training of Deep Neural
Networks with Extremely Noisy Labels, NeurIPS 2018, https://arxiv.org/abs/1804.06872. A label is
wrong with probability `rate`. `symmetric`: all other classes are equally likely; `pair`: it is the
next class, after the last class the first.

Equal rates are the globalized noise of Liang et al., FedNoisy: Federated Noisy Label Learning
Benchmark, 2023, https://arxiv.org/abs/2306.11650. Departure: FedNoisy draws the rates of its
localized noise. Here they rise from client to client, as the levels of `data.noise` do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedml_noniid.core.errors import UserError
from fedml_noniid.core.randomness import fold, uniform
from fedml_noniid.data.streams import key
from fedml_noniid.data.types import Floats, Ints


def rates(form: str, rate: float, n_clients: int) -> Floats:
    """The probability that a label of a client is wrong, [N].

    `equal`: `rate` for every client; `level`: client i has rate i / (N - 1), so the labels of the
    first are clean. A single client has `rate`.
    """
    if form == "level" and n_clients > 1:
        return rate * (np.arange(n_clients) / (n_clients - 1))
    return np.full(n_clients, float(rate))


def flipped(
    kind: str, rate: Floats, labels: Ints, clients: Sequence[Ints], n_classes: int, seed: int
) -> list[Ints]:
    """Each client's labels of its own samples, some of them wrong, in the order of its positions.

    `rate` [N] is that of `rates`, `labels` [n] are the true ones of the training set. The draws
    depend on seed, client and position only: the labels that are wrong at one rate are wrong at
    every higher rate, and in the same way. Raises UserError for data with a single class.
    """
    if n_classes < 2:
        raise UserError(
            path=("label_noise",),
            value=kind,
            allowed="data with at least two classes, as a wrong label is another class",
        )
    return [
        _flipped(
            kind,
            float(rate[client]),
            labels[positions],
            positions,
            n_classes,
            key(seed, "label noise", client),
        )
        for client, positions in enumerate(clients)
    ]


def _flipped(
    kind: str, rate: float, labels: Ints, positions: Ints, n_classes: int, of_client: int
) -> Ints:
    """The labels [n] of one client.

    Each sample has a key of its own, from that of the client and its position.
    """
    keys = fold(torch.tensor(of_client), torch.from_numpy(positions))
    wrong, which = uniform(keys, 2, dtype=torch.float64).numpy().T  # [n] each, from 0 to below 1
    further = 1 + np.floor(which * (n_classes - 1)).astype(np.int64) if kind == "symmetric" else 1
    return np.where(wrong < rate, (labels + further) % n_classes, labels)
